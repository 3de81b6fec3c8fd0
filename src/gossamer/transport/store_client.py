"""A connection to the store that can't hold its caller: a thread asks, and the caller waits for the answer with a clock of its own.

torch's client waits without limit where packets vanish, or where the process with the store is stopped. A worker must be able to give up
then, to hear Ctrl-C, and to end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Silent(Exception):
    """The store has not answered in time."""


class StoreClient:
    """``connect`` opens the connection. It is called with the first question."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._questions: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, question: Callable[[Any], Answer], timeout: float) -> Answer:
        """``question(store)``, in the thread. After :class:`Silent` the thread may still be at it, and the next question comes after."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_answer, args=(self._questions, self._connect), name="gossamer-store", daemon=True
                )
                self._thread.start()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._questions.put((question, answers))
        try:
            answer, error = answers.get(timeout=timeout)
        except queue.Empty:
            raise Silent(f"the store has not answered for {timeout:g} s") from None
        if error is not None:
            raise error
        result: Answer = answer
        return result

    def close(self) -> None:
        """The thread ends when the last question has been answered."""
        if self._thread is not None:
            self._questions.put(None)
            with contextlib.suppress(RuntimeError):
                self._thread.join(0.5)


def _answer(questions: queue.SimpleQueue[Any], connect: Callable[[], Any]) -> None:
    store = None
    while (item := questions.get()) is not None:
        question, answers = item
        try:
            store = store if store is not None else connect()
            answers.put((question(store), None))
        except BaseException as error:
            answers.put((None, error))
        del item, question, answers
