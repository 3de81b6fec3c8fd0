"""Ray as a ``concurrent.futures.Executor``: each call is a task of a cluster, which has the queue."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from typing import Any

from gossamer.integrations import needs

with needs("ray"):
    import ray
    from ray._private import ray_constants

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray uses loopback only, which is its default on these two systems


class RayExecutor(Executor):
    """``address``: of a cluster that ``ray start --head`` has begun. Without one, Ray is started on this machine, on loopback, without
    dashboard and usage statistics, and ends with the executor. Ray that runs in this process already is used as it is.

    Each call gets ``cpus`` and ``gpus``, which may be fractions; Ray sets which GPUs it sees. A call whose node is lost is an error."""

    def __init__(self, address: str | None = None, cpus: float = 1, gpus: float = 0) -> None:
        self._mine = not ray.is_initialized()
        self._task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(_run)
        self._sent: dict[bytes, Any] = {}  # what is the same for many calls goes to each node once
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._mine and address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            with _on_loopback():
                ray.init(
                    address="local", include_dashboard=False, **quiet
                )  # without it, $RAY_ADDRESS or a cluster of this machine
        elif self._mine:
            ray.init(address=address, **quiet)

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        return _Call(self._task.remote(call, *map(self._put, arguments), **more))

    def _put(self, argument: Any) -> Any:
        if not isinstance(argument, bytes):
            return argument
        if argument not in self._sent:
            self._sent[argument] = ray.put(argument)
        return self._sent[argument]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """``wait``: nothing is waited for; calls that are still at work end with Ray."""
        if self._mine:
            ray.shutdown()


def _run(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    return call(*arguments, **more)


class _Call(Future):
    """Cancelled, it is taken out of the cluster's queue."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self._reference = reference
        reference.future().add_done_callback(self._answer)

    def _answer(self, done: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            error = done.exception()
            if error is None:
                self.set_result(done.result())
            else:
                self.set_exception(error)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            ray.cancel(self._reference, force=True)
        return cancelled


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    os.environ[_LOOPBACK] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[_LOOPBACK]
