"""Hands groups to replicas: in turn where a run must be reproducible, else to the one with the fewest under way.

A group stays on its replica with all turns of its sessions, so that the engine's prefix cache has what came before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tqppo.errors import DeadlineExceeded, EngineError
from tqppo.processes.hosting import Call, HostDied, Watch, cause_of, settle

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Dispatcher(Generic[T, R]):
    """Calls `start(replica, items)`; each replica has at most `room` items under way, 0: as many as there are."""

    start: Callable[[int, Sequence[T]], Call[R]]
    num_replicas: int
    room: int
    timeout_s: float
    missing: Callable[[], str]
    watch: Watch | None = None

    def run(self, items: Sequence[T]) -> list[R]:
        """The results of all calls; when one fails, or time is up, the others are cancelled on their replicas."""
        waiting, load = deque(self._batches(items)), [0] * self.num_replicas
        under_way: dict[Call[R], tuple[int, int]] = {}  # call → its replica, its number of items
        found: list[R] = []
        deadline = time.monotonic() + self.timeout_s
        try:
            while waiting or under_way:
                while waiting and (replica := self._next_replica(load)) is not None:
                    batch = waiting.popleft()
                    under_way[self.start(replica, batch)] = (replica, len(batch))
                    load[replica] += len(batch)
                for call in self._ended(list(under_way), deadline):
                    replica, count = under_way.pop(call)
                    load[replica] -= count
                    found.append(_result(call))
        finally:
            for call in under_way:
                call.cancel()
        return found

    def _batches(self, items: Sequence[T]) -> list[Sequence[T]]:
        """One batch per replica, taken in turn, or single items to hand out as replicas have room."""
        if self.room:
            return [[item] for item in items]
        shares = [items[i :: self.num_replicas] for i in range(self.num_replicas)]
        assert sum(map(len, shares)) == len(items), "a prompt would be lost or sampled twice"
        return [share for share in shares if share]

    def _next_replica(self, load: Sequence[int]) -> int | None:
        """The first replica with the least to do; None if all of them have enough."""
        replica = min(range(self.num_replicas), key=load.__getitem__)
        return replica if not self.room or load[replica] < self.room else None

    def _ended(self, calls: list[Call[R]], deadline: float) -> list[Call[R]]:
        settled = settle(calls, max(0.0, deadline - time.monotonic()), watch=self.watch, until_first=True)
        if settled.still:
            raise EngineError(f"the rollout: {'; '.join(settled.still)}")
        if len(settled.pending) == len(calls):
            raise DeadlineExceeded(f"the rollout did not finish within {self.timeout_s:g} s. {self.missing()}")
        return [call for place, call in enumerate(calls) if place not in settled.pending]


def _result(call: Call[R]) -> R:
    try:
        return call.result()
    except HostDied as error:
        raise cause_of(error, "the rollout", EngineError) from None
