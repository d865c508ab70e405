"""Which groups make a batch, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tqppo.data.prompts import Prompt
from tqppo.errors import TrainingAborted
from tqppo.queue.client import Queue
from tqppo.trainers.groups import GroupCollector


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
            self.queue.tag({prompt.uid: {"is_prompt": True, "status": status, "order": order, "error": "it broke"}})

    def collector(self, **options: Any) -> GroupCollector:
        settings = {"on_incomplete": "error", "filter_groups": False, "max_rounds": 4, **options}
        return GroupCollector(self.queue, self.draw, **settings)


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
