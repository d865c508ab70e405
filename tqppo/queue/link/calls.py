"""One implementation for blocking and asynchronous callers: coroutines that await nothing but a `Reply`.

`run(coroutine)` drives such a coroutine without an event loop and blocks on each reply; under asyncio the same
coroutine is awaited as usual. No call starts a thread or an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar, cast

import ray

from tqppo.errors import DataLost, DeadlineExceeded, QueueError, TqppoError

T = TypeVar("T")
log = logging.getLogger(__name__)
_mode = threading.local()

# The remote side keeps the deadline and explains a timeout; the caller waits this much longer for the explanation.
GRACE_S = 4.0
START_S = 120.0  # for a process to start, which on a busy machine takes much longer than any answer

# After QUIET_S without an answer the other process is pinged and has PING_WAITS times PING_WAIT_S to answer: together
# below 5 s. Several short waits, so that a machine that was suspended for a while loses only one of them.
QUIET_S, PING_WAIT_S, PING_WAITS = 1.0, 0.6, 4
NOT_YET: Any = object()


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
            is_done = await _is_done(wrapped, self.timeout_s)
        except asyncio.CancelledError:
            if not self.drop() and self.future.exception(GRACE_S) is None:
                self.undo(self.future.result())
            raise
        return wrapped.result() if is_done else self._result_at_deadline()

    def _result_at_deadline(self) -> T:
        message = self.explain()
        if not self.drop():
            return self.future.result(GRACE_S)  # the answer came between the timeout and the drop
        raise DeadlineExceeded(f"after {self.timeout_s:g} s: {message}") from None


class NoAnswer(DeadlineExceeded):
    """The other process did not answer in time; it may or may not have done what it was asked."""


class Unresponsive(NoAnswer):
    """The other process does not answer pings, or is known to be dead."""


class Heartbeat:
    """Tells whether another process is alive. `send_ping` returns a Ray object that the process resolves at once.

    All calls that wait for the process share one outstanding ping.
    """

    def __init__(self, send_ping: Callable[[], Any]) -> None:
        self._send_ping = send_ping
        self._ping: Any = None
        self._sent_at = 0.0
        self._is_answered = True

    def ping(self) -> Any:
        """The ping under way; a new one if the last was answered a while ago."""
        now = time.monotonic()
        if self._ping is None or (self._is_answered and now > self._sent_at + QUIET_S / 2):
            self._sent_at, self._is_answered = now, False
            self._ping = self._send_ping()
            self._ping.future().add_done_callback(self._mark_answered)
        return self._ping

    def _mark_answered(self, _: Future[Any]) -> None:
        self._is_answered = True

    @property
    def waits_left(self) -> int:
        """How many waits of PING_WAIT_S the ping under way still has."""
        return max(1, PING_WAITS - int((time.monotonic() - self._sent_at) / PING_WAIT_S))


class RemoteReply(Reply[T]):
    """An answer of another process. A slow process is waited for until the deadline as long as its heartbeats answer;
    one that is dead or unresponsive is an error within seconds."""

    def __init__(self, process: str, timeout_s: float, heartbeats: Sequence[Heartbeat]) -> None:
        self.process, self.timeout_s, self.heartbeats = process, timeout_s, heartbeats

    # -- what a subclass defines -----------------------------------------------------------------------------------

    def _attempt(self, seconds: float) -> Any:
        """Wait for the raw answer; NOT_YET after so many seconds, and then a further call continues the wait."""
        raise NotImplementedError

    async def _answer(self) -> Any:
        raise NotImplementedError

    def _taken(self, answer: Any) -> T:
        """Turn a raw answer into the result."""
        return cast(T, answer)

    def _abandon(self) -> None:
        """Give the call up."""

    # -- waiting ---------------------------------------------------------------------------------------------------

    def block(self) -> T:
        try:
            answer = self._wait()
        except BaseException as error:
            self._abandon()
            self._raise_cause(error)
            raise
        return self._taken(answer)

    def _wait(self) -> Any:
        for turn, seconds in enumerate(self._turns()):
            if turn and self.heartbeats:
                self._check_alive()
            if (answer := self._attempt(seconds)) is not NOT_YET:
                return answer
        raise NoAnswer(f"{self.process} did not answer within {self.timeout_s:g} s")

    async def resolve(self) -> T:
        task = asyncio.ensure_future(self._answer())
        try:
            answer = await self._wait_async(task)
        except BaseException as error:
            task.cancel()
            await asyncio.wait({task})
            self._abandon()
            self._raise_cause(error)
            raise
        return self._taken(answer)

    async def _wait_async(self, task: asyncio.Task[Any]) -> Any:
        for turn, seconds in enumerate(self._turns()):
            if turn and self.heartbeats:
                await self._check_alive_async()
            if await _is_done(task, seconds):
                return task.result()
        raise NoAnswer(f"{self.process} did not answer within {self.timeout_s:g} s")

    def _turns(self) -> Iterator[float]:
        """Seconds to wait at a time; between two waits the process is pinged."""
        deadline, left = time.monotonic() + self.timeout_s, self.timeout_s
        while left > 0:
            yield min(left, QUIET_S) if self.heartbeats else left
            left = deadline - time.monotonic()

    def _check_alive(self) -> None:
        pings = [heartbeat.ping() for heartbeat in self.heartbeats]
        for _ in range(self._ping_waits()):
            if len(ray.wait(pings, num_returns=len(pings), timeout=PING_WAIT_S)[0]) == len(pings):
                return self._check_answers(lambda: ray.get(pings))
        raise self._unresponsive()

    async def _check_alive_async(self) -> None:
        pings = asyncio.ensure_future(_all([heartbeat.ping() for heartbeat in self.heartbeats]))
        for _ in range(self._ping_waits()):
            if await _is_done(pings, PING_WAIT_S):
                return self._check_answers(pings.result)
        pings.cancel()
        raise self._unresponsive()

    def _ping_waits(self) -> int:
        return max(heartbeat.waits_left for heartbeat in self.heartbeats)

    def _check_answers(self, answers: Callable[[], object]) -> None:
        """Ray answers the ping of a dead process with an error."""
        try:
            answers()
        except ray.exceptions.RayError as error:
            raise Unresponsive(f"{self.process} is gone: {first_line(error)}") from error

    def _unresponsive(self) -> Unresponsive:
        waited_s = PING_WAITS * PING_WAIT_S
        return Unresponsive(
            f"{self.process} is unresponsive: it answered neither a call nor, for {waited_s:g} s, a ping"
        )

    def _raise_cause(self, error: BaseException) -> None:
        """Raise the error behind one of Ray's or of a socket, if it says more."""
        cause = getattr(error, "cause", None)
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, TqppoError):
            raise cause from error
        if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, OSError)):
            raise DataLost(f"{self.process} is gone: {first_line(error)}") from error


class RayReply(RemoteReply[T]):
    """A Ray object, or a list of them. The death of its owner raises `DataLost`, a timeout `NoAnswer`."""

    def __init__(self, ref: Any, process: str, timeout_s: float, heartbeats: Sequence[Heartbeat] = ()) -> None:
        super().__init__(process, timeout_s, heartbeats)
        self.ref = ref

    def _attempt(self, seconds: float) -> Any:
        try:
            return ray.get(self.ref, timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            return NOT_YET

    async def _answer(self) -> Any:
        return await (_all(self.ref) if isinstance(self.ref, list) else self.ref)


async def _all(refs: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*refs)


async def _is_done(task: asyncio.Future[Any], seconds: float) -> bool:
    return bool((await asyncio.wait({task}, timeout=seconds))[0])


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
