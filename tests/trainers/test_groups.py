"""Which groups make a batch, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tqppo.data.prompts import Prompt
from tqppo.errors import QueueError, TrainingAborted
from tqppo.metrics.events import Event, GroupLeftOut, SessionsLeftOut, ShortBatch
from tqppo.queue.client import Queue
from tqppo.trainers.groups import CollectorOptions, GroupCollector, Ledger


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True)
    yield queue
    queue.close()


class World:
    """Prompts without end, and a rollout that gives each the rewards (and status) that the test wrote down."""

    def __init__(self, queue: Queue, outcomes: Sequence[tuple[str, list[float]]]) -> None:
        self.queue = queue
        self.outcomes = outcomes
        self.drawn = 0
        self.events: list[Event] = []

    def draw(self, count: int) -> list[Prompt]:
        first, self.drawn = self.drawn, self.drawn + count
        return [Prompt(f"p{i}", i, [1], "", "task", {}, "") for i in range(first, self.drawn)]

    def generate(self, prompts: Sequence[tuple[int, Prompt]]) -> None:
        for order, prompt in reversed(prompts):  # completion order is never the prompts' order
            status, rewards = self.outcomes[prompt.index % len(self.outcomes)]
            tags = [
                {"uid": prompt.uid, "session": s, "trajectory": 0, "order": order, "reward": reward}
                for s, reward in enumerate(rewards)
            ]
            keys = [f"{prompt.uid}_{s}_0" for s in range(len(rewards))]
            if keys:
                self.queue.put(keys, {"reward": torch.tensor(rewards)}, tags=tags)
            marker = {"is_prompt": True, "status": status, "order": order, "error": "it broke", "rows": len(keys)}
            self.queue.tag({prompt.uid: {**marker, "failed_sessions": int(status == "failed"), "retries": 0}})

    def collector(self, **options: Any) -> GroupCollector:
        return GroupCollector(self.queue, self.draw, CollectorOptions(**options), self.events.append)


GOOD, BAD, FLAT = ("finished", [0.0, 1.0]), ("failed", [1.0]), ("finished", [1.0, 1.0])


def uids(batch: Any) -> list[str]:
    return [tags["uid"] for tags in batch.tags]


def test_whole_groups_come_back_in_canonical_order_and_markers_are_gone(queue: Queue) -> None:
    world = World(queue, [GOOD])
    batch, _ = world.collector().collect(3, world.generate)
    assert batch.keys == tuple(f"p{i}_{s}_0" for i in range(3) for s in range(2))
    assert set(queue.list().keys) == set(batch.keys)


def test_an_incomplete_group_is_an_error_by_default(queue: Queue) -> None:
    world = World(queue, [GOOD, BAD])
    with pytest.raises(TrainingAborted, match=r"prompt p1 has a failed session: it broke.*on_incomplete_group"):
        world.collector().collect(2, world.generate)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("drop", ["p0", "p0"]), ("keep", ["p0", "p0", "p1"]), ("refill", ["p0", "p0", "p2", "p2"])],
)
def test_an_incomplete_group_follows_its_policy(queue: Queue, policy: str, expected: list[str]) -> None:
    world = World(queue, [GOOD, BAD])
    batch, metrics = world.collector(on_incomplete=policy).collect(2, world.generate)
    assert uids(batch) == expected
    assert set(queue.list().keys) == set(batch.keys)
    lost = metrics["training/rollout_failure/evicted_samples"]
    assert lost == (0.0 if policy == "keep" else 1.0)


def test_sessions_that_a_kept_group_goes_on_without_have_an_event_with_the_reason(queue: Queue) -> None:
    world = World(queue, [GOOD, BAD])
    _, metrics = world.collector(on_incomplete="keep").collect(3, world.generate, 5)
    assert world.events == [SessionsLeftOut(step=5, prompt="p1", sessions=1, reason="it broke")]
    assert metrics["sessions/failed"] == 1.0


def test_groups_without_signal_are_replaced_when_they_are_filtered(queue: Queue) -> None:
    world = World(queue, [GOOD, FLAT])
    batch, metrics = world.collector(filter_groups=True).collect(3, world.generate)
    assert uids(batch) == ["p0", "p0", "p2", "p2", "p4", "p4"]
    assert set(queue.list().keys) == set(batch.keys)
    assert metrics["training/filter_groups/evicted_samples"] > 0


def test_filtering_gives_up_after_its_rounds_and_keeps_the_batch_whole(queue: Queue) -> None:
    world = World(queue, [FLAT])
    batch, _ = world.collector(filter_groups=True, max_rounds=2).collect(2, world.generate)
    assert len(set(uids(batch))) == 2
    assert set(queue.list().keys) == set(batch.keys)


def test_no_group_at_all_is_an_error_and_never_an_empty_batch(queue: Queue) -> None:
    world = World(queue, [("failed", [])])
    with pytest.raises(TrainingAborted, match="no trajectories"):
        world.collector(on_incomplete="drop").collect(2, world.generate)
    assert len(queue.list()) == 0
    assert [(event.prompt, event.outcome, event.reason) for event in left_out(world)] == [
        ("p0", "failed", "it broke"),
        ("p1", "failed", "it broke"),
    ]


def left_out(world: World) -> list[GroupLeftOut]:
    return [event for event in world.events if isinstance(event, GroupLeftOut)]


def counts(metrics: dict[str, float]) -> list[float]:
    return [metrics[f"groups/{name}"] for name in ("dispatched", "trained", "dropped", "failed")]


DROPPED = ("dropped", [0.0, 0.0])


@pytest.mark.parametrize(
    ("outcomes", "options", "expected"),
    [
        ([GOOD], {}, [4, 4, 0, 0]),
        ([GOOD, BAD], {"on_incomplete": "drop"}, [4, 2, 0, 2]),
        ([GOOD, BAD], {"on_incomplete": "keep"}, [4, 4, 0, 0]),
        ([GOOD, ("failed", [])], {"on_incomplete": "keep"}, [4, 2, 0, 2]),
        ([GOOD, BAD, GOOD, DROPPED], {"on_incomplete": "refill"}, [7, 4, 1, 2]),
        ([GOOD, FLAT], {"filter_groups": True}, [7, 4, 3, 0]),
        ([GOOD, FLAT, BAD], {"filter_groups": True, "on_incomplete": "drop"}, [9, 4, 2, 3]),
    ],
)
def test_every_prompt_is_trained_on_dropped_or_failed_and_each_one_left_out_has_an_event(
    queue: Queue, outcomes: Any, options: Any, expected: list[float]
) -> None:
    world = World(queue, outcomes)
    batch, metrics = world.collector(**options).collect(4, world.generate, 7)
    assert counts(metrics) == expected
    dispatched, trained, dropped, failed = expected
    assert dispatched == world.drawn
    assert trained == len(set(uids(batch)))
    assert [sum(event.outcome == name for event in left_out(world)) for name in ("dropped", "failed")] == [
        dropped,
        failed,
    ]
    assert all(event.step == 7 and event.reason for event in left_out(world))


def test_numbers_that_do_not_add_up_are_an_error() -> None:
    Ledger(dispatched=5, trained=3, dropped=1, failed=1).check()
    with pytest.raises(QueueError, match="5 prompts were dispatched, but 3 are trained on"):
        Ledger(dispatched=5, trained=3, failed=1).check()


def test_a_row_that_its_prompt_wrote_and_the_queue_lacks_is_an_error(queue: Queue) -> None:
    world = World(queue, [GOOD])

    def lossy(prompts: Sequence[tuple[int, Prompt]]) -> None:
        world.generate(prompts)
        queue.clear(queue.list().select(["p1_0_0"]))

    with pytest.raises(QueueError, match="prompt p1 wrote 2 rows, and the queue has 1"):
        world.collector().collect(2, lossy)


def test_out_of_rounds_a_batch_is_short_and_says_so(queue: Queue) -> None:
    world = World(queue, [GOOD, BAD])
    batch, metrics = world.collector(on_incomplete="refill", max_rounds=1).collect(4, world.generate, 3)
    (short,) = (event for event in world.events if isinstance(event, ShortBatch))
    assert short == ShortBatch(step=3, wanted=4, useful=2, filled=0, rounds=1)
    assert "step 3 trains on 2 of 4 groups: 1 rounds" in short.notice
    assert len(set(uids(batch))) == 2
    assert counts(metrics) == [4, 2, 0, 2]


def test_out_of_rounds_a_filtered_batch_takes_groups_without_signal_and_says_so(queue: Queue) -> None:
    world = World(queue, [GOOD, FLAT, FLAT, FLAT])
    _, metrics = world.collector(filter_groups=True, max_rounds=2).collect(4, world.generate, 3)
    (short,) = (event for event in world.events if isinstance(event, ShortBatch))
    assert (short.useful, short.filled) == (2, 2)
    assert metrics["groups/trained"] == 4
    assert all("same reward" in event.reason for event in left_out(world))


def test_out_of_rounds_a_run_can_stop_instead(queue: Queue) -> None:
    world = World(queue, [GOOD, BAD])
    with pytest.raises(TrainingAborted, match=r"2 of 4 groups after 1 rounds; raise algorithm\.filter_max_rounds"):
        world.collector(on_incomplete="refill", max_rounds=1, on_short="error").collect(4, world.generate)


def test_dropping_incomplete_groups_is_no_short_batch(queue: Queue) -> None:
    world = World(queue, [GOOD, BAD])
    world.collector(on_incomplete="drop", on_short="error").collect(4, world.generate)
    assert {type(event) for event in world.events} == {GroupLeftOut}


def test_signal_is_a_difference_between_the_final_rewards_of_sessions(queue: Queue) -> None:
    """Credit that differs within a session does not make its group one with signal, and order does not matter."""

    def generate(prompts: Sequence[tuple[int, Prompt]]) -> None:
        for order, prompt in prompts:
            rows = [(s, t, 1.0 if t == 1 else float(s)) for s in range(2) for t in (1, 0)]
            keys = [f"{prompt.uid}_{s}_{t}" for s, t, _ in rows]
            tags = [
                {"uid": prompt.uid, "session": s, "trajectory": t, "order": order, "reward": reward}
                for s, t, reward in rows
            ]
            queue.put(keys, {"reward": torch.zeros(4)}, tags=tags)
            marker = {"is_prompt": True, "status": "finished", "order": order, "error": "", "rows": 4}
            queue.tag({prompt.uid: {**marker, "failed_sessions": 0, "retries": 0}})

    world = World(queue, [])
    world.collector(filter_groups=True, max_rounds=1).collect(2, generate)
    assert [event.filled for event in world.events if isinstance(event, ShortBatch)] == [2]
