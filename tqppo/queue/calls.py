"""One implementation for blocking and asynchronous callers: coroutines that await nothing but `Reply`.

`run(coroutine)` drives one without an event loop, blocking on each reply; under asyncio the same coroutine
is awaited as usual. No thread and no loop is made per call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import ray

from tqppo.errors import DataLost, DeadlineExceeded, TqppoError

T = TypeVar("T")
_mode = threading.local()

# A remote side keeps its own deadline and explains itself; we give up only when it stays silent for this much longer.
GRACE_S = 4.0
START_S = 120.0  # for a process to start: on a busy machine much longer than any answer takes


class Reply:
    """An answer that has not come yet."""

    def block(self) -> Any:
        raise AssertionError("a kind of reply says how to wait for it")

    async def resolve(self) -> Any:
        raise AssertionError("a kind of reply says how to await it")

    def __await__(self) -> Generator[Any, Any, Any]:
        if getattr(_mode, "blocking", False):
            return (yield self)
        return (yield from self.resolve().__await__())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine of replies to its end in this thread."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        before = getattr(_mode, "blocking", False)
        _mode.blocking = True
        try:
            reply = step(value)
        except StopIteration as end:
            return end.value
        finally:
            _mode.blocking = before
        try:
            step, value = coroutine.send, reply.block()
        except BaseException as error:  # noqa: BLE001 (it is the coroutine's to handle)
            step, value = coroutine.throw, error


class Waiting(Reply):
    """A future of this process, with a deadline. `explain` says at the deadline what is missing; `drop` ends the
    wait, and is False when the answer came just before."""

    def __init__(self, future: Future[Any], explain: Callable[[], str], drop: Callable[[], bool]) -> None:
        self.future, self.explain, self.drop = future, explain, drop
        self.timeout_s = 0.0

    def within(self, timeout_s: float) -> Waiting:
        self.timeout_s = timeout_s
        return self

    def block(self) -> Any:
        try:
            return self.future.result(self.timeout_s)
        except FutureTimeout:
            return self._late()

    async def resolve(self) -> Any:
        if self.future.done():
            return self.future.result()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.future), self.timeout_s)
        except asyncio.TimeoutError:
            return self._late()
        except asyncio.CancelledError:
            self.drop()
            raise

    def _late(self) -> Any:
        message = self.explain()
        if not self.drop():
            return self.future.result()
        raise DeadlineExceeded(f"after {self.timeout_s:g} s: {message}") from None


class Done(Reply):
    """An answer that is here already."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def block(self) -> Any:
        return self.value

    async def resolve(self) -> Any:
        return self.value


class Silence(DeadlineExceeded):
    """Nothing was heard of the other side, which may or may not have done what it was asked."""


class Remote(Reply):
    """A Ray object (or a list of them) on its way. Its maker's death is `DataLost`, no answer in time `Silence`."""

    def __init__(self, ref: Any, who: str, timeout_s: float) -> None:
        self.ref, self.who, self.timeout_s = ref, who, timeout_s

    def block(self) -> Any:
        try:
            return ray.get(self.ref, timeout=self.timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._explained(error) from error

    async def resolve(self) -> Any:
        try:
            return await asyncio.wait_for(self._value(), self.timeout_s)
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            raise self._explained(error) from error

    async def _value(self) -> Any:
        return await (asyncio.gather(*self.ref) if isinstance(self.ref, list) else self.ref)

    def _explained(self, error: BaseException) -> BaseException:
        cause = getattr(error, "cause", None)
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, TqppoError):
            return cause
        if isinstance(error, (TimeoutError, asyncio.TimeoutError)):  # Ray's GetTimeoutError is one
            return Silence(f"{self.who} did not answer within {self.timeout_s:g} s")
        if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)):
            return DataLost(f"{self.who} is gone: {first_line(error)}")
        return error


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
