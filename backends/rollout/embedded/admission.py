"""Which requests join the batch, and when. In deterministic mode the answer does not depend on timing.

Announced sessions form a batch and go turn by turn: once every session of the batch has asked or ended, one request of
each forms a cohort, which is sorted by `Request.order` and decodes alone. Requests of sessions that were not announced
join at once, unless a cohort is decoding or waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def family(self) -> str: ...


T = TypeVar("T", bound=Ordered)


class SessionBatch(Generic[T]):
    """Sessions that wait for each other, each with its requests that wait. Those of one session keep their order."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[T]] = {}
        self.decoding: set[T] = set()  # requests in a cohort that have no result yet
        self._num_idle = 0  # sessions without a waiting request
        self.changed_at = time.monotonic()  # when a session last asked, got its answer or ended

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait for sessions that have nothing to decode either."""
        return self._num_idle < len(self.waiting) and not self.decoding

    @property
    def missing(self) -> list[str]:
        return [session for session, requests in self.waiting.items() if not requests]

    def open(self, session: str) -> None:
        self.waiting[session] = deque()
        self._num_idle += 1

    def add(self, request: T) -> None:
        requests = self.waiting[request.family]
        self._num_idle -= not requests
        requests.append(request)

    def remove(self, request: T) -> None:
        requests = self.waiting[request.family]
        requests.remove(request)
        self._num_idle += not requests

    def close(self, session: str) -> deque[T]:
        """Take a session out; returns what it still waits for."""
        requests = self.waiting.pop(session)
        self._num_idle -= not requests
        return requests

    def cohort(self) -> list[T]:
        """One request of each session, sorted, once all of them wait; else empty."""
        if self._num_idle:
            return []
        cohort = [requests.popleft() for requests in self.waiting.values()]
        self._num_idle = len(self.missing)
        self.decoding.update(cohort)
        return sorted(cohort, key=_order)


class Admission(Generic[T]):
    """Requests that wait for a row."""

    def __init__(self, *, deterministic: bool, max_rows: int) -> None:
        self._deterministic = deterministic
        self._max_rows = max_rows
        self._batches: dict[str, SessionBatch[T]] = {}
        self._batch_of: dict[str, str] = {}  # session → name of its batch
        self._cohorts: deque[list[T]] = deque()  # complete
        self._open: list[T] = []  # of sessions that were not announced
        self._current: deque[T] = deque()  # the rest of the batch that decodes, not yet admitted
        self._is_closed = False  # the batch that decodes is a cohort

    @property
    def is_ready(self) -> bool:
        """Whether a request can be admitted as soon as there is room."""
        return bool(self._current or self._open or self._cohorts)

    @property
    def is_admitting(self) -> bool:
        """Whether some requests of the batch that decodes have no row yet."""
        return bool(self._current)

    @property
    def has_batches(self) -> bool:
        return bool(self._batches)

    @property
    def stalled_since(self) -> float | None:
        """Since when requests wait only for sessions that neither ask nor end; None if no batch is stalled."""
        return min((batch.changed_at for batch in self._batches.values() if batch.is_stalled), default=None)

    def expect(self, sessions: Sequence[str], batch: str) -> None:
        """Announce sessions: from now on the others of their batch wait for them."""
        if not self._deterministic:
            return
        joined = self._batches.setdefault(batch, SessionBatch())
        for session in sessions:
            if session not in self._batch_of:
                self._batch_of[session] = batch
                joined.open(session)

    def end(self, session: str) -> None:
        """The others of its batch no longer wait for this session."""
        name = self._batch_of.pop(session, None)
        if name is not None:
            self._open += self._batches[name].close(session)
            self._changed(name)

    def add(self, request: T) -> None:
        name = self._batch_of.get(request.family)
        if name is None:
            self._open.append(request)
        else:
            self._batches[name].add(request)
            self._changed(name)

    def take(self, num_free: int, num_running: int) -> list[T]:
        """The requests to admit now, in order."""
        if not self._current:
            self._next_batch(num_running)
        waiting = len(self._current)
        # A prefill of few prompts costs almost as much as one of many, so several rows are filled at a time.
        if not waiting or (num_running and num_free < min(waiting, max(1, self._max_rows // 8))):
            return []
        return [self._current.popleft() for _ in range(min(waiting, num_free))]

    def finish(self, request: T) -> None:
        """A request has its result, or its caller has gone."""
        name = self._batch_of.get(request.family)
        if name is not None:
            batch = self._batches[name]
            batch.decoding.discard(request)
            batch.changed_at = time.monotonic()

    def remove(self, request: T) -> bool:
        """Withdraw a request that has not been admitted; false if it is not waiting."""
        for place in (self._open, self._current, *self._cohorts):
            if request in place:
                place.remove(request)
                return True
        batch = self._batches.get(self._batch_of.get(request.family, ""))
        if batch is None or request not in batch.waiting[request.family]:
            return False
        batch.remove(request)
        return True

    def give_up_waiting(self, since: float) -> Iterator[tuple[T, list[str]]]:
        """End batches that have been stalled since then; yields what waits in them, and the sessions it waited for."""
        stalled = [name for name, batch in self._batches.items() if batch.is_stalled and batch.changed_at <= since]
        for name in stalled:
            batch = self._batches.pop(name)
            for session, requests in batch.waiting.items():
                del self._batch_of[session]
                yield from ((request, batch.missing) for request in requests)

    def clear(self) -> None:
        """Forget all requests and sessions."""
        self._current.clear()
        self._cohorts.clear()
        self._open.clear()
        self._batches.clear()
        self._batch_of.clear()

    def _changed(self, name: str) -> None:
        batch = self._batches[name]
        batch.changed_at = time.monotonic()
        if not batch:
            del self._batches[name]
        elif cohort := batch.cohort():
            self._cohorts.append(cohort)

    def _next_batch(self, num_running: int) -> None:
        if self._cohorts:
            if not num_running:
                self._current, self._is_closed = deque(self._cohorts.popleft()), True
        elif self._open and not (num_running and self._is_closed):
            self._current, self._is_closed = deque(sorted(self._open, key=_order)), False
            self._open = []


def _order(request: Ordered) -> tuple[int, ...]:
    return request.order
