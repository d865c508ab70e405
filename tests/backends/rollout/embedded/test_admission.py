"""Which requests join the batch, and when."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

admission: Any = importlib.import_module("tqppo_backends.rollout.embedded.admission")


@dataclass(eq=False)
class Call:
    order: tuple[int, ...]


def waiting(*, deterministic: bool = True, max_rows: int = 8) -> Any:
    return admission.Admission(deterministic=deterministic, max_rows=max_rows)


def test_announced_requests_wait_for_each_other_and_are_sorted() -> None:
    queue, first, second = waiting(), Call((1,)), Call((0,))
    queue.expect(2)
    queue.add(first)
    assert not queue.is_ready
    queue.add(second)
    assert queue.take(8, 0) == [second, first]


def test_a_cohort_waits_until_the_batch_before_it_has_ended() -> None:
    queue, alone, announced = waiting(), Call((5,)), Call((0,))
    queue.add(alone)
    assert queue.take(8, 0) == [alone]
    queue.expect(1)
    queue.add(announced)
    assert queue.take(7, 1) == []
    assert queue.take(8, 0) == [announced]


def test_a_withdrawn_announcement_completes_the_cohort() -> None:
    queue, call = waiting(), Call((0,))
    queue.expect(2)
    queue.add(call)
    queue.expect(-1)
    assert queue.take(8, 0) == [call]


def test_giving_up_returns_the_requests_that_had_come() -> None:
    queue, call = waiting(), Call((0,))
    queue.expect(3)
    queue.add(call)
    assert queue.give_up_gathering() == [call]
    assert not queue.is_ready
    assert queue.num_expected == 0


def test_few_free_rows_are_filled_only_together() -> None:
    queue = waiting(deterministic=False, max_rows=32)
    for place in range(10):
        queue.add(Call((place,)))
    assert queue.take(3, 29) == []
    assert len(queue.take(4, 28)) == 4


def test_a_request_is_removed_wherever_it_waits() -> None:
    queue, call = waiting(), Call((0,))
    queue.add(call)
    assert queue.remove(call)
    assert not queue.remove(call)
