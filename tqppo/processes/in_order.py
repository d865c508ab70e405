"""Work that is done in the order in which it is given, on a thread of its own or at once. Imports no Ray.

A driver whose engines work ahead of it gives them their work here. What the engines do then follows from the order of
the calls alone, and not from how long anything takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar

T = TypeVar("T")
END_TIMEOUT_S = 10.0  # a thread that takes longer is left to end with the process


class InOrder(Protocol):
    """Does one piece of work after the other. `failure` has the error of the first that failed, as soon as it did."""

    failure: Future[NoReturn]

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have work done after all that was submitted before."""

    def stop(self) -> None:
        """Begin no more work. What is under way goes on until its own calls end or fail."""

    def join(self) -> None:
        """After `stop`: wait for the work that is under way, for some seconds."""


class AtOnce:
    """Does work when it is submitted, in the caller's thread, and raises its error there."""

    def __init__(self) -> None:
        self.failure: Future[NoReturn] = Future()  # never done

    def submit(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(work())
        return done

    def stop(self) -> None:
        """Nothing is under way."""

    def join(self) -> None:
        """Nothing is under way."""


class Background:
    """Does work on a thread of its own. After a failure it does no more: all later work fails with the same error."""

    def __init__(self, name: str) -> None:
        self.failure: Future[NoReturn] = Future()
        self._is_stopping = False
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._waiting.put((work, done))
        return done

    def stop(self) -> None:
        self._is_stopping = True
        self._waiting.put(None)

    def join(self) -> None:
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None and not self._is_stopping:
            work, done = item
            if self.failure.done():
                done.set_exception(self.failure.exception())
                continue
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 (those who wait for the work, or for `failure`, raise it)
                self.failure.set_exception(error)
                done.set_exception(error)
