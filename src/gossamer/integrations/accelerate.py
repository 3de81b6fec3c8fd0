"""Hugging Face Accelerate: ``GossamerAccelerator(graph="ada-auto")`` in the place of ``Accelerator()``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.integrations import needs, replicas
from gossamer.parallel import DecentralizedDataParallel
from gossamer.schedules import Schedule

with needs("accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

_WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU")  # where each worker has a whole model
_FOLDER = "replicas"


class GossamerAccelerator(Accelerator):
    """An Accelerator whose ``prepare()`` averages as :class:`~gossamer.DecentralizedDataParallel` does.

    - ``graph``, ``options``: of DecentralizedDataParallel.
    - ``gossip``: arguments of ``model.gossip()``, such as ``{"profile_every": 100}``.
    - everything else: of Accelerator.

    A model's optimizers are prepared in the same call as the model, or in one call after it.
    """

    gossiping: list[DecentralizedDataParallel]

    def __init__(
        self,
        graph: str | Graph | Schedule = "auto",
        *,
        options: Mapping[str, Any] | None = None,
        gossip: Mapping[str, Any] | None = None,
        **accelerators: Any,
    ) -> None:
        super().__init__(**accelerators)
        self._takes_over(graph, options, gossip)

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        graph: str | Graph | Schedule = "auto",
        options: Mapping[str, Any] | None = None,
        gossip: Mapping[str, Any] | None = None,
    ) -> GossamerAccelerator:
        """An Accelerator that a framework has made becomes one of these."""
        accelerator.__class__ = cls
        accelerator._takes_over(graph, options, gossip)
        return accelerator

    def _takes_over(
        self, graph: str | Graph | Schedule, options: Mapping[str, Any] | None, gossip: Mapping[str, Any] | None
    ) -> None:
        if self.distributed_type.value not in _WHOLE:
            raise GossamerError(
                f"GossamerAccelerator averages whole models, and the configuration says {self.distributed_type.value}; "
                "use MULTI_CPU or MULTI_GPU"
            )
        hook = self.ddp_handler.comm_hook.value if self.ddp_handler is not None else "no"
        if hook != "no":
            raise GossamerError(
                f"GossamerAccelerator: comm_hook {hook!r} is for torch's DDP; here the graph and wire= say what travels, and how often"
            )
        self._graph, self._options, self._gossip = graph, dict(options or {}), dict(gossip or {})
        self.gossiping = []

    # --- The model and its optimizers -------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        # Accelerate's own part: the device, autocast, compilation. Then ours, in the place of DDP.
        ready = super().prepare_model(model, device_placement, evaluation_mode=True)
        wrapped: Any = DecentralizedDataParallel(ready, self._graph, **self._options)
        wrapped._is_accelerate_prepared = True
        self.gossiping.append(wrapped)
        return wrapped

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prepare(*args, **kwargs)
        optimizers = [
            one.optimizer for one in (found if isinstance(found, tuple) else (found,)) if isinstance(one, AcceleratedOptimizer)
        ]
        for model in self.gossiping:
            parameters = set(map(id, model.parameters()))
            mine = [
                one for one in optimizers if any(id(p) in parameters for group in one.param_groups for p in group["params"])
            ]
            if mine:
                model.gossip(*mine, scaler=self.scaler, **self._gossip)
        return found

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return super().unwrap_model(model.module if isinstance(model, DecentralizedDataParallel) else model, *args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        self.gossiping.clear()
        return super().free_memory(*objects)

    # --- Checkpoints ------------------------------------------------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged model, and in ``replicas/`` each worker's own state."""
        with replicas.averaged(*self.gossiping):
            folder = super().save_state(*args, **kwargs)
        self.save_replicas(folder)
        return folder

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        folders: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            super().load_state(*args, **kwargs)
        finally:
            hook.remove()
        self.load_replicas(folders[0])

    def save_replicas(self, folder: str | os.PathLike[str]) -> None:
        """Beside a checkpoint of a trainer, what each worker has of its own. All workers call it."""
        for k, model in enumerate(self.gossiping):
            if replicas.differ(model):
                replicas.save(model, Path(folder) / _FOLDER / str(k))

    def load_replicas(self, folder: str | os.PathLike[str]) -> None:
        for k, model in enumerate(self.gossiping):
            if replicas.differ(model):
                replicas.load(model, Path(folder) / _FOLDER / str(k))
