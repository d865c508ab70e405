"""One implementation for blocking and asynchronous callers: coroutines that await nothing but `Reply`.

`run(coroutine)` drives one without an event loop, blocking on each reply; under asyncio the same coroutine
is awaited as usual. No thread and no loop is made per call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import ray

from tqppo.errors import DataLost, DeadlineExceeded, QueueError, TqppoError

T = TypeVar("T")
log = logging.getLogger(__name__)
_mode = threading.local()

# A remote side keeps its own deadline and explains itself; we give up only when it stays silent for this much longer.
GRACE_S = 4.0
START_S = 120.0  # for a process to start: on a busy machine much longer than any answer takes

# Without an answer for QUIET_S, the other side is pinged and has BEATS times BEAT_S to answer: below 5 s together, and
# long for a process that lives. Several waits, so that a machine that stood still for a while costs only one of them.
QUIET_S, BEAT_S, BEATS = 1.0, 0.6, 4
NOT_YET: Any = object()


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


async def tidy(call: Awaitable[Any]) -> None:
    """What is done after a failure must not hide it."""
    try:
        await call
    except QueueError as error:
        log.warning("the queue's index did not hear that something is over: %s", error)


class Waiting(Reply):
    """A future of this process, with a deadline. `explain` says at the deadline what is missing; `drop` ends the
    wait, and is False when the answer came just before; `undo` takes back an answer that nobody is there to hear."""

    def __init__(
        self, future: Future[Any], explain: Callable[[], str], drop: Callable[[], bool],
        undo: Callable[[Any], None] = lambda answer: None,
    ) -> None:  # fmt: skip
        self.future, self.explain, self.drop, self.undo = future, explain, drop, undo
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
        heard = asyncio.wrap_future(self.future)
        try:
            is_here = await _is_done(heard, self.timeout_s)
        except asyncio.CancelledError:
            if not self.drop() and self.future.exception(GRACE_S) is None:
                self.undo(self.future.result())
            raise
        return heard.result() if is_here else self._late()

    def _late(self) -> Any:
        message = self.explain()
        if not self.drop():
            return self.future.result(GRACE_S)  # it came just now
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


class NoPulse(Silence):
    """The other side did not even answer a ping, or is known to be dead."""


class Pulse:
    """Whether another process lives. `ask` sends it a question that it answers at once, with a Ray object; however
    many calls wait for the process, one after the other or together, they share the question."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._ping: Any = None
        self._asked_at = 0.0
        self._is_answered = True

    def ping(self) -> Any:
        now = time.monotonic()
        if self._ping is None or (self._is_answered and now > self._asked_at + QUIET_S / 2):
            self._asked_at, self._is_answered = now, False
            self._ping = self._ask()
            self._ping.future().add_done_callback(self._hear)
        return self._ping

    def _hear(self, _: Future[Any]) -> None:
        self._is_answered = True

    @property
    def beats(self) -> int:
        """How many waits for an answer are left."""
        return max(1, BEATS - int((time.monotonic() - self._asked_at) / BEAT_S))


class Distant(Reply):
    """An answer of another process, which may take until the deadline as long as the process has a pulse: one that is
    slow is waited for, one that is dead or silent is an error within seconds."""

    def __init__(self, who: str, timeout_s: float, pulses: Sequence[Pulse]) -> None:
        self.who, self.timeout_s, self.pulses = who, timeout_s, pulses

    # What a kind of answer brings: how to wait for it, and what to do with it, or without it.

    def _attempt(self, seconds: float) -> Any:
        """The answer, or NOT_YET; called again, it goes on waiting."""
        raise AssertionError("a kind of answer says how to wait for it")

    async def _answer(self) -> Any:
        raise AssertionError("a kind of answer says how to await it")

    def _taken(self, answer: Any) -> Any:
        return answer

    def _abandon(self) -> None:
        return None

    def block(self) -> Any:
        try:
            answer = self._waited()
        except BaseException as error:
            self._abandon()
            self._explain(error)
            raise
        return self._taken(answer)

    def _waited(self) -> Any:
        for turn, seconds in enumerate(self._turns()):
            if turn:
                self._feel()
            if (answer := self._attempt(seconds)) is not NOT_YET:
                return answer
        raise Silence(f"{self.who} did not answer within {self.timeout_s:g} s")

    async def resolve(self) -> Any:
        task = asyncio.ensure_future(self._answer())
        try:
            answer = await self._awaited(task)
        except BaseException as error:
            task.cancel()
            await asyncio.wait({task})
            self._abandon()
            self._explain(error)
            raise
        return self._taken(answer)

    async def _awaited(self, task: asyncio.Task[Any]) -> Any:
        for turn, seconds in enumerate(self._turns()):
            if turn:
                await self._afeel()
            if await _is_done(task, seconds):
                return task.result()
        raise Silence(f"{self.who} did not answer within {self.timeout_s:g} s")

    def _turns(self) -> Iterator[float]:
        """How long to wait at a time; between two waits the pulse is felt."""
        deadline, left = time.monotonic() + self.timeout_s, self.timeout_s
        while left > 0:
            yield min(left, QUIET_S) if self.pulses else left
            left = deadline - time.monotonic()

    def _feel(self) -> None:
        pings = [pulse.ping() for pulse in self.pulses]
        for _ in range(max(pulse.beats for pulse in self.pulses)):
            if len(ray.wait(pings, num_returns=len(pings), timeout=BEAT_S)[0]) == len(pings):
                return self._check(lambda: ray.get(pings))
        raise self._no_pulse()

    async def _afeel(self) -> None:
        pings = asyncio.ensure_future(_all([pulse.ping() for pulse in self.pulses]))
        for _ in range(max(pulse.beats for pulse in self.pulses)):
            if await _is_done(pings, BEAT_S):
                return self._check(pings.result)
        pings.cancel()
        raise self._no_pulse()

    def _check(self, answers: Callable[[], Any]) -> None:
        """Of a dead process, the answer to a ping is an error."""
        try:
            answers()
        except ray.exceptions.RayError as error:
            raise NoPulse(f"{self.who} is gone: {first_line(error)}") from error

    def _no_pulse(self) -> NoPulse:
        return NoPulse(f"{self.who} is silent: it answered neither a call nor, for {BEATS * BEAT_S:g} s, a ping")

    def _explain(self, error: BaseException) -> None:
        """Raise what says more than this error."""
        cause = getattr(error, "cause", None)
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, TqppoError):
            raise cause from error
        if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, OSError)):
            raise DataLost(f"{self.who} is gone: {first_line(error)}") from error


class Remote(Distant):
    """A Ray object (or a list of them) on its way. Its maker's death is `DataLost`, no answer in time `Silence`."""

    def __init__(self, ref: Any, who: str, timeout_s: float, pulses: Sequence[Pulse] = ()) -> None:
        super().__init__(who, timeout_s, pulses)
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
