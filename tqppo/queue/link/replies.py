"""Answers of other processes, waited for with a deadline. Pings meanwhile tell a slow process from a dead one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import ray

from tqppo.errors import DataLost, TqppoError
from tqppo.processes.host_memory import out_of_memory
from tqppo.processes.ray_calls import ACTOR_GONE
from tqppo.queue.link.calls import NoAnswer, Reply, Unresponsive, first_line, is_done

T = TypeVar("T")

# After QUIET_S without an answer the other process is pinged and has PING_WAITS times PING_WAIT_S to answer: together
# below 5 s. Several short waits, so that a machine that was suspended for a while loses only one of them.
QUIET_S, PING_WAIT_S, PING_WAITS = 1.0, 0.6, 4
NOT_YET: Any = object()


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
            if await is_done(task, seconds):
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
            if await is_done(pings, PING_WAIT_S):
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
            raise self._gone(error, Unresponsive) from error

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
        if isinstance(error, (*ACTOR_GONE, ray.exceptions.ObjectLostError, OSError)):
            raise self._gone(error, DataLost) from error

    def _gone(self, error: BaseException, kind: type[TqppoError]) -> TqppoError:
        return out_of_memory(error, self.process) or kind(f"{self.process} is gone: {first_line(error)}")


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
