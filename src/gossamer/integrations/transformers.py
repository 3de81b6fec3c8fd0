"""Hugging Face's Trainer: ``GossamerTrainer(graph="ada-auto", model=…, args=…)`` in the place of ``Trainer(model=…, args=…)``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.integrations import needs, replicas
from gossamer.parallel import DecentralizedDataParallel
from gossamer.schedules import Schedule

with needs("transformers"):
    from transformers import Trainer

from gossamer.integrations.accelerate import GossamerAccelerator


class GossamerTrainer(Trainer):
    """A Trainer whose workers average as :class:`~gossamer.DecentralizedDataParallel` does.

    - ``graph``, ``options``: of DecentralizedDataParallel.
    - ``gossip``: arguments of ``model.gossip()``, such as ``{"profile_every": 100}``.
    - everything else: of the Trainer.

    Evaluation, saved models and the model after ``train()`` are averaged over the workers. In a checkpoint's folder ``replicas/`` each
    worker has its own state: a job of as many workers goes on exactly. For a class that is made from Trainer:
    ``class Mine(GossamerTrainer, SFTTrainer)``.
    """

    accelerator: GossamerAccelerator

    def __init__(
        self,
        *args: Any,
        graph: str | Graph | Schedule = "auto",
        options: Mapping[str, Any] | None = None,
        gossip: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._averaging, self._trains = (graph, options, gossip), False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        if isinstance(self.model, DecentralizedDataParallel):
            raise GossamerError("GossamerTrainer wraps the model itself; give it the bare model")
        super().create_accelerator_and_postprocess()
        GossamerAccelerator.of(self.accelerator, *self._averaging)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._trains = True
        result = super().train(*args, **kwargs)
        for model in self.accelerator.gossiping:
            replicas.finish(model)
        self._trains = False  # all have the same model: a worker may evaluate or save by itself
        return result

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return replicas.averaged(*(self.accelerator.gossiping if self._trains else []))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._averaged():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self.accelerator.save_replicas(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.accelerator.load_replicas(checkpoint)
