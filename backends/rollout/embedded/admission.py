"""Which requests join the batch, and when. In deterministic mode the answer does not depend on timing.

Announced requests form a cohort, which is complete when all of them have come. It is sorted by `Request.order` and
decodes alone. Requests that were not announced join at once, unless a cohort is decoding or waiting.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    order: tuple[int, ...]


T = TypeVar("T", bound=Ordered)


class Admission(Generic[T]):
    """Requests that wait for a row."""

    def __init__(self, *, deterministic: bool, max_rows: int) -> None:
        self._deterministic = deterministic
        self._max_rows = max_rows
        self.num_expected = 0  # announced, not come yet
        self.gathering: list[T] = []  # announced and come, waiting for the others
        self._cohorts: deque[list[T]] = deque()  # complete
        self._open: list[T] = []  # not announced
        self._current: deque[T] = deque()  # the rest of the batch that decodes, not yet admitted
        self._is_closed = False  # the batch that decodes is a cohort

    @property
    def is_ready(self) -> bool:
        """Whether a request can be admitted as soon as there is room."""
        return bool(self._current or self._open or self._cohorts)

    def expect(self, num_requests: int) -> None:
        """Announce requests; a negative number withdraws announcements."""
        if self._deterministic:
            self.num_expected = max(0, self.num_expected + num_requests)
            self._complete()

    def add(self, request: T) -> None:
        if self.num_expected:
            self.num_expected -= 1
            self.gathering.append(request)
            self._complete()
        else:
            self._open.append(request)

    def take(self, num_free: int, num_running: int) -> list[T]:
        """The requests to admit now, in order."""
        if not self._current:
            self._next_batch(num_running)
        waiting = len(self._current)
        # A prefill of few prompts costs almost as much as one of many, so several rows are filled at a time.
        if not waiting or (num_running and num_free < min(waiting, max(1, self._max_rows // 8))):
            return []
        return [self._current.popleft() for _ in range(min(waiting, num_free))]

    def remove(self, request: T) -> bool:
        """Withdraw a request that has not been admitted; false if it is not waiting."""
        for place in (self.gathering, self._open, self._current, *self._cohorts):
            if request in place:
                place.remove(request)
                return True
        return False

    def give_up_gathering(self) -> list[T]:
        """Cancel all announcements; returns the requests that waited for the others."""
        gathered, self.gathering, self.num_expected = self.gathering, [], 0
        return gathered

    def clear(self) -> None:
        self._current.clear()
        self._cohorts.clear()
        self._open.clear()
        self.give_up_gathering()

    def _complete(self) -> None:
        if self.gathering and not self.num_expected:
            self._cohorts.append(sorted(self.gathering, key=_order))
            self.gathering = []

    def _next_batch(self, num_running: int) -> None:
        if self._cohorts:
            if not num_running:
                self._current, self._is_closed = deque(self._cohorts.popleft()), True
        elif self._open and not (num_running and self._is_closed):
            self._current, self._is_closed = deque(sorted(self._open, key=_order)), False
            self._open = []


def _order(request: Ordered) -> tuple[int, ...]:
    return request.order
