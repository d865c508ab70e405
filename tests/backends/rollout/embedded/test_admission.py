"""Which requests join the batch, and when."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest

admission: Any = importlib.import_module("tqppo_backends.rollout.embedded.admission")


@dataclass(eq=False)
class Call:
    order: tuple[int, ...]
    family: str = ""


def waiting(*announced: str, deterministic: bool = True, max_rows: int = 8) -> Any:
    made = admission.Admission(deterministic=deterministic, max_rows=max_rows)
    made.expect(announced, "step")
    return made


def test_announced_sessions_wait_for_each_other_and_are_sorted() -> None:
    queue, first, second = waiting("a", "b"), Call((1,), "a"), Call((0,), "b")
    queue.add(first)
    assert not queue.is_ready
    queue.add(second)
    assert queue.take(8, 0) == [second, first]


def test_sessions_go_on_turn_by_turn_until_they_end() -> None:
    queue = waiting("a", "b")
    for turn in range(2):
        calls = [Call((0, turn), "a"), Call((1, turn), "b")]
        queue.add(calls[1])
        assert not queue.is_ready
        queue.add(calls[0])
        assert queue.take(8, 0) == calls
    last = Call((1, 2), "b")
    queue.add(last)
    assert not queue.is_ready
    queue.end("a")
    assert queue.take(8, 0) == [last]


def test_a_session_that_joins_is_waited_for() -> None:
    queue, calls = waiting("a"), [Call((0,), "a"), Call((1,), "b")]
    queue.expect(["b"], "step")
    queue.add(calls[0])
    assert not queue.is_ready
    queue.add(calls[1])
    assert queue.take(8, 0) == calls


def test_two_batches_do_not_wait_for_each_other() -> None:
    queue, call = waiting("a"), Call((0,), "b")
    queue.expect(["b"], "validation")
    queue.add(call)
    assert queue.take(8, 0) == [call]


def test_requests_of_one_session_go_one_at_a_time_in_their_order() -> None:
    """The sub-agents of a session that run side by side."""
    queue, calls = waiting("a", "b"), [Call((5,), "a"), Call((4,), "a"), Call((9,), "b")]
    for call in calls:
        queue.add(call)
    assert queue.take(8, 0) == [calls[0], calls[2]]
    queue.end("b")
    assert queue.take(8, 0) == [calls[1]]


def test_a_cohort_waits_until_the_batch_before_it_has_ended() -> None:
    queue, alone, announced = waiting("a"), Call((5,)), Call((0,), "a")
    queue.add(alone)
    assert queue.take(8, 0) == [alone]
    queue.add(announced)
    assert queue.take(7, 1) == []
    assert queue.take(8, 0) == [announced]


def test_giving_up_returns_the_requests_that_had_come_and_what_they_waited_for() -> None:
    queue, call = waiting("a", "b", "c"), Call((0,), "b")
    assert queue.stalled_since is None
    queue.add(call)
    assert queue.stalled_since is not None
    assert list(queue.give_up_waiting(since=queue.stalled_since - 1)) == []
    assert list(queue.give_up_waiting(since=queue.stalled_since)) == [(call, ["a", "c"])]
    assert not queue.is_ready
    assert queue.stalled_since is None


def test_waiting_for_sessions_that_decode_is_no_stall() -> None:
    queue, calls = waiting("a", "b"), [Call((0,), "a"), Call((1,), "b")]
    for call in calls:
        queue.add(call)
    queue.finish(calls[0])
    queue.add(Call((2,), "a"))
    assert queue.stalled_since is None
    queue.finish(calls[1])
    assert queue.stalled_since is not None


def test_few_free_rows_are_filled_only_together() -> None:
    queue = waiting(deterministic=False, max_rows=32)
    for place in range(10):
        queue.add(Call((place,)))
    assert queue.take(3, 29) == []
    assert len(queue.take(4, 28)) == 4


@pytest.mark.parametrize("family", ["", "a"])
def test_a_request_is_removed_wherever_it_waits(family: str) -> None:
    queue, call = waiting("a", "b"), Call((0,), family)
    queue.add(call)
    assert queue.remove(call)
    assert not queue.remove(call)
