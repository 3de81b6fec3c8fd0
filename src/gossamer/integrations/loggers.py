"""Loggers, each a callable ``log(numbers, step)`` for ``model.gossip(optimizer, log=…)`` and ``dbench.bench(…, log=…)``.

    model.gossip(optimizer, log=TensorBoard("runs/tensorboard"))

Each queues what it is given, and a thread of its own writes it down: training never waits for a disk or a network. What finds the queue
full is left out, and a warning says how much. Nothing is opened before the first numbers come, so a worker that logs nothing makes no file.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gossamer.errors import GossamerError

Value = float | str
Items = Sequence[tuple[dict[str, Value], int]]

_ROOM = 10_000  # steps that may wait to be written
_AT_ONCE = 100  # steps that are written together, at most
_CLOSE_SECONDS = 30.0  # that the end of a process waits for what is queued


class Logger:
    """What all of them share. ``open``, ``write`` and ``shut`` run in the logger's thread alone."""

    package: ClassVar[str]  # what is imported
    install: ClassVar[str]  # what installs it

    def __init__(self) -> None:
        try:
            there = importlib.util.find_spec(self.package) is not None
        except (ImportError, ValueError):
            there = False
        if not there:
            raise GossamerError(f"{self} needs the package {self.package}; install it with: pip install {self.install}")
        self.left_out = 0
        self._queue: queue.Queue[tuple[dict[str, Value], int] | None] = queue.Queue(_ROOM)
        self._thread: threading.Thread | None = None
        self._failed = False

    def __str__(self) -> str:
        return type(self).__name__

    def __call__(self, numbers: Mapping[str, Value], step: int) -> None:
        if self._failed:
            return  # which was said
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"gossamer-{self}", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        try:
            self._queue.put_nowait((dict(numbers), step))
        except queue.Full:
            if not self.left_out:
                warnings.warn(f"{self} is slower than training: numbers from step {step} on are left out", stacklevel=2)
            self.left_out += 1

    def close(self) -> None:
        """Write what is queued, for half a minute at most. At the end of a process it happens by itself."""
        thread, self._thread = self._thread, None
        atexit.unregister(self.close)
        if thread is None or self._failed:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
            thread.join(deadline - time.monotonic())
        except queue.Full:
            pass
        if thread.is_alive():
            warnings.warn(f"{self} has not written everything within {_CLOSE_SECONDS:g} s; the rest is lost", stacklevel=2)
        if self.left_out:
            warnings.warn(f"{self} was slower than training: the numbers of {self.left_out} steps were left out", stacklevel=2)

    def _work(self) -> None:
        step: int | None = None
        try:
            self.open()
            atexit.unregister(self.close)  # now once more, to come before what the package does at the end
            atexit.register(self.close)
            items: list[tuple[dict[str, Value], int]] = []
            while True:
                item = self._queue.get()
                if item is not None:
                    items.append(item)
                if items and (item is None or len(items) == _AT_ONCE or self._queue.empty()):
                    step = items[0][1]
                    self.write(items)
                    items = []
                if item is None:
                    break
            self.shut()
        except Exception as error:
            self._failed = True
            where = "at its start" if step is None else f"at step {step}"
            text = str(error).strip().splitlines() or [type(error).__name__]
            warnings.warn(f"{self} failed {where}: {text[0]}; nothing more is logged there, training goes on", stacklevel=2)

    def open(self) -> None: ...

    def write(self, items: Items) -> None:
        raise NotImplementedError

    def shut(self) -> None: ...


class TensorBoard(Logger):
    """Event files in ``folder``; see them with ``tensorboard --logdir folder``. Text, such as the graph, is under "Text"."""

    package = install = "tensorboard"

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self.folder), flush_secs=10)

    def write(self, items: Items) -> None:
        for numbers, step in items:
            for key, value in numbers.items():
                if isinstance(value, str):
                    self._writer.add_text(key, value, step)
                else:
                    self._writer.add_scalar(key, value, step)

    def shut(self) -> None:
        self._writer.close()


class WandB(Logger):
    """A run of Weights & Biases, offline unless ``mode="online"`` or WANDB_MODE says otherwise: ``wandb sync`` sends it later.

    - ``run``: a run that the script has begun, and ends itself.
    - ``settings``: further arguments of ``wandb.init``, such as ``group`` and ``dir``.
    """

    package = install = "wandb"

    def __init__(self, project: str = "gossamer", name: str | None = None, *, run: Any = None, **settings: Any) -> None:
        super().__init__()
        self.run, self._own = run, run is None
        self.settings = {"project": project, "name": name, **settings}

    def open(self) -> None:
        if self._own:
            import wandb

            mode = os.environ.get("WANDB_MODE", "offline")
            self.run = wandb.init(**{"mode": mode, "reinit": "create_new", **self.settings})

    def write(self, items: Items) -> None:
        for numbers, step in items:
            self.run.log(numbers, step=step)

    def shut(self) -> None:
        if self._own:
            self.run.finish()


class MLflow(Logger):
    """A run in MLflow's tracking store ``uri`` (default: MLflow's own): a server, a database (which needs all of mlflow), or
    ``file:///folder``, which mlflow-skinny can write. Text becomes tags.

    ``run``: the id of a run that the script has begun, and ends itself.
    """

    package, install = "mlflow", "mlflow-skinny"

    def __init__(
        self, experiment: str = "gossamer", name: str | None = None, *, uri: str | None = None, run: str | None = None
    ) -> None:
        super().__init__()
        self.experiment, self.name, self.uri, self.run, self._own = experiment, name, uri, run, run is None

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        if (self.uri or "").startswith("file:"):  # which MLflow maintains no further, and refuses unless it is told
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client: Any = MlflowClient(self.uri)
        if self.run is not None:
            return
        found = self._client.get_experiment_by_name(self.experiment)
        try:
            number = found.experiment_id if found else self._client.create_experiment(self.experiment)
        except MlflowException:  # another process was faster
            number = self._client.get_experiment_by_name(self.experiment).experiment_id
        self.run = self._client.create_run(number, run_name=self.name).info.run_id

    def write(self, items: Items) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        metrics: list[Any] = []
        tags: dict[str, str] = {}
        for numbers, step in items:
            tags |= {key: value for key, value in numbers.items() if isinstance(value, str)}
            metrics += [Metric(key, float(value), now, step) for key, value in numbers.items() if not isinstance(value, str)]
        for k in range(0, max(1, len(metrics)), 1000):  # more it does not take at once
            some = [RunTag(key, value) for key, value in tags.items()] if k == 0 else []
            self._client.log_batch(self.run, metrics=metrics[k : k + 1000], tags=some)

    def shut(self) -> None:
        if self._own:
            self._client.set_terminated(self.run)


class Trackio(Logger):
    """A run of Trackio, in its database on this machine; see it with ``trackio show --project …``. ``settings``: of ``trackio.init``."""

    package = install = "trackio"

    def __init__(self, project: str = "gossamer", name: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.settings = {"project": project, "name": name, **settings}

    def open(self) -> None:
        import trackio

        self._run: Any = trackio.init(**self.settings)

    def write(self, items: Items) -> None:
        for numbers, step in items:
            self._run.log(numbers, step=step)

    def shut(self) -> None:
        self._run.finish()


Make = Callable[[str], Logger]  # of a run's name


class Named:
    """A logger for each run of a bench, from ``KIND`` or ``KIND=WHERE``; in a plain object, so that it reaches other processes."""

    KINDS: ClassVar[dict[str, str]] = {
        "tensorboard": "folder",
        "wandb": "project",
        "mlflow": "tracking URI",
        "trackio": "project",
    }

    def __init__(self, text: str, bench: str, out: Path) -> None:
        kind, _, where = text.partition("=")
        if kind not in self.KINDS:
            known = ", ".join(f"{name} or {name}={what.upper().replace(' ', '_')}" for name, what in self.KINDS.items())
            raise GossamerError(f"--log {text}: there is no logger {kind!r}; there are {known}")
        self.kind, self.where, self.bench, self.out = kind, where, bench, out
        self("check")  # the package is missing now, not in the middle of a bench

    def __call__(self, name: str) -> Logger:
        if self.kind == "tensorboard":
            return TensorBoard(Path(self.where or self.out / "tensorboard") / name)
        if self.kind == "wandb":
            return WandB(self.where or self.bench, name, dir=str(self.out))
        if self.kind == "mlflow":
            return MLflow(self.bench, name, uri=self.where or (self.out / "mlflow").absolute().as_uri())
        return Trackio(self.where or self.bench, name)
