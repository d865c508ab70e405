"""One implementation for blocking and asynchronous callers: coroutines that await nothing but a `Reply`.

`run(coroutine)` drives such a coroutine without an event loop and blocks on each reply; under asyncio the same
coroutine is awaited as usual. No call starts a thread or an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar, cast

from tqppo.errors import DeadlineExceeded, QueueError

T = TypeVar("T")
log = logging.getLogger(__name__)
_mode = threading.local()

# The remote side keeps the deadline and explains a timeout; the caller waits this much longer for the explanation.
GRACE_S = 4.0
START_S = 120.0  # for a process to start, which on a busy machine takes much longer than any answer


class Reply(Generic[T]):
    """An answer that has not arrived yet. Subclasses say how to block on it and how to await it."""

    def block(self) -> T:
        raise NotImplementedError

    async def resolve(self) -> T:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, Any, T]:
        if getattr(_mode, "blocking", False):
            return cast(T, (yield self))
        return (yield from self.resolve().__await__())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to completion a coroutine that awaits only replies, in this thread."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        before = getattr(_mode, "blocking", False)
        _mode.blocking = True
        try:
            reply = step(value)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            _mode.blocking = before
        try:
            step, value = coroutine.send, reply.block()
        except BaseException as error:  # noqa: BLE001 (the coroutine handles it)
            step, value = coroutine.throw, error


async def clean_up(call: Awaitable[object]) -> None:
    """Await a clean-up call after a failure; log its error instead of raising it, so that the failure is not masked."""
    try:
        await call
    except QueueError as error:
        log.warning("a clean-up call to the queue's index failed: %s", error)


class Pending(Reply[T]):
    """A future of this process with a deadline.

    `explain` says at the deadline what is missing. `drop` ends the wait; it returns False if the answer came first.
    `undo` takes back an answer whose caller was cancelled.
    """

    def __init__(
        self, future: Future[T], explain: Callable[[], str], drop: Callable[[], bool],
        undo: Callable[[T], None] = lambda answer: None,
    ) -> None:  # fmt: skip
        self.future, self.explain, self.drop, self.undo = future, explain, drop, undo
        self.timeout_s = 0.0

    @staticmethod
    def done(value: T) -> Pending[T]:
        """An answer that needs no wait."""
        future: Future[T] = Future()
        future.set_result(value)
        return Pending(future, lambda: "", lambda: False)

    def within(self, timeout_s: float) -> Pending[T]:
        self.timeout_s = timeout_s
        return self

    def block(self) -> T:
        try:
            return self.future.result(self.timeout_s)
        except FutureTimeout:
            return self._result_at_deadline()

    async def resolve(self) -> T:
        if self.future.done():
            return self.future.result()
        wrapped = asyncio.wrap_future(self.future)
        try:
            has_answer = await is_done(wrapped, self.timeout_s)
        except asyncio.CancelledError:
            if not self.drop() and self.future.exception(GRACE_S) is None:
                self.undo(self.future.result())
            raise
        return wrapped.result() if has_answer else self._result_at_deadline()

    def _result_at_deadline(self) -> T:
        message = self.explain()
        if not self.drop():
            return self.future.result(GRACE_S)  # the answer came between the timeout and the drop
        raise DeadlineExceeded(f"after {self.timeout_s:g} s: {message}") from None


class NoAnswer(DeadlineExceeded):
    """The other process did not answer in time; it may or may not have done what it was asked."""


class Unresponsive(NoAnswer):
    """The other process does not answer pings, or is known to be dead."""


async def is_done(task: asyncio.Future[Any], seconds: float) -> bool:
    return bool((await asyncio.wait({task}, timeout=seconds))[0])


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
