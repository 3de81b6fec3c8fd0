"""Lightning: ``Trainer(strategy=GossamerStrategy("ada-auto"))`` in the place of ``Trainer(strategy="ddp")``."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.integrations import needs, replicas
from gossamer.parallel import DecentralizedDataParallel
from gossamer.schedules import Schedule

with needs("lightning"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

# What Lightning's own DDPStrategy takes, and what it means here too. Its `timeout` is of the process group, ours of Gossamer.
_LIGHTNINGS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "start_method",
)
_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
_STEP = "gossamer_step"  # in a checkpoint: of the replicas beside it


class GossamerStrategy(DDPStrategy):
    """Averages as :class:`~gossamer.DecentralizedDataParallel` does, with its arguments, and those of Lightning's DDPStrategy.

    - ``graph``, ``options``: of DecentralizedDataParallel. ``epochs`` and ``steps_per_epoch`` come from the Trainer.
    - ``gossip``: arguments of ``model.gossip()``, such as ``{"profile_every": 100}``.

    Validation, Lightning's checkpoints and the module after ``fit()`` are the averaged model. Beside a checkpoint, in ``….replicas``, each
    worker has its own state: a job of as many workers goes on exactly. With ``graph="all-reduce"`` the replicas are the same, so there
    is no such folder.
    """

    def __init__(
        self, graph: str | Graph | Schedule = "auto", *, gossip: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        for key in _HOOKS:
            if options.get(key) is not None:
                raise GossamerError(
                    f"GossamerStrategy({key}=…): it is for torch's DDP; here the graph and wire= say what travels, and how often"
                )
        super().__init__(**{key: options.pop(key) for key in _LIGHTNINGS if key in options})
        self._graph, self._options, self._gossip = graph, options, dict(gossip or {})
        self._validation = contextlib.ExitStack()
        self._resumed_from: str | os.PathLike[str] = ""

    @property
    def gossiping(self) -> DecentralizedDataParallel | None:
        """The wrapped module, during ``fit()``."""
        return self.model if isinstance(self.model, DecentralizedDataParallel) else None

    # --- The model and its optimizers -------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.gossiping is not None:
            self.gossiping.gossip(*self.optimizers, scaler=getattr(self.precision_plugin, "scaler", None), **self._gossip)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        options = dict(self._options)
        if replicas.by_epoch(self._graph, self.world_size):
            trainer = self.lightning_module.trainer
            epochs, steps = trainer.max_epochs, trainer.estimated_stepping_batches
            if epochs > 0 and steps != float("inf"):
                options = {"epochs": epochs, "steps_per_epoch": max(1, int(steps) // epochs)} | options
        return DecentralizedDataParallel(model, self._graph, **options)

    def _register_ddp_hooks(self) -> None:
        """There are none: they are of torch's DDP."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.gossiping.no_sync() if self.gossiping is not None else contextlib.nullcontext():
            yield

    def on_validation_start(self) -> None:
        self._validation.enter_context(replicas.averaged(self.model))

    def on_validation_end(self) -> None:
        self._validation.close()

    def on_train_end(self) -> None:
        if self.gossiping is not None:
            replicas.finish(self.gossiping)

    def teardown(self) -> None:
        if self.gossiping is not None:
            if not self.gossiping._driver.busy:  # after an error it may be
                self._validation.close()
                self.gossiping.close()
            self.model = self.lightning_module
        super().teardown()

    # --- Checkpoints ------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with replicas.averaged(self.model):
            state = super().lightning_module_state_dict()
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], **options: Any) -> None:
        write = functools.partial(super().save_checkpoint, checkpoint, filepath, **options)
        model = self.gossiping
        if model is None or "optimizer_states" not in checkpoint or not replicas.differ(model):
            write()
            return
        inside = model._driver.averaged  # callbacks save at the end of validation too
        self._validation.close()
        checkpoint[_STEP] = model.steps
        replicas.save(model, _beside(filepath), write)
        if inside:
            self.on_validation_start()

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.gossiping is not None and replicas.differ(self.gossiping):
            replicas.load(self.gossiping, _beside(self._resumed_from), checkpoint.get(_STEP))


def _beside(filepath: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(filepath)}.replicas")
