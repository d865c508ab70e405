from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from tqppo import dataflow
from tqppo.dataflow import Features, Stage
from tqppo.errors import QueueError
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.process import bridge
from tqppo.workers.process.ranks import Ranks
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create(local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


@pytest.fixture
def batch(queue: Queue, rows: dict[str, Any]) -> BatchMeta:
    keys = [f"p{i}_0_0" for i in range(8)]
    tags = [{"seq_len": len(tokens)} for tokens in rows["tokens"].unbind()]
    return queue.put(keys, {name: rows[name] for name in rows if name != "old_logprobs"}, tags=tags)


def test_a_batch_and_its_tensors_give_the_same(make_actor: Any, queue: Queue, batch: BatchMeta, rows: Any) -> None:
    direct, bridged = make_actor(), make_actor()
    bridged.queue = queue
    columns = direct.old_logprobs(rows)
    assert bridge.run_columns(bridged, Actor.old_logprobs, batch) == ("old_logprobs",)
    stored = queue.get(batch, ["old_logprobs"])
    for name in stored:
        assert torch.equal(stored[name].values(), columns[name].values())
        assert stored[name].offsets().tolist() == columns[name].offsets().tolist()
    metrics = direct.update({**rows, "old_logprobs": columns["old_logprobs"]}, step=1, sizes=[4, 4])
    assert bridge.run_update(bridged, Actor.update, batch, step=1, sizes=[4, 4]) == metrics


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_the_ranks_that_compute_rows_together_puts_their_columns(
    make_actor: Any, queue: Queue, batch: BatchMeta, rows: Any, rank: int
) -> None:
    actor = make_actor()
    computed = actor.old_logprobs(rows)

    class Known:
        """A rank whose results are known."""

        features, ranks = actor.features, Ranks(rank, 2, 2)

        def __init__(self) -> None:
            self.queue = queue

        @bridge.implements(dataflow.OLD_LOGPROBS)
        def old_logprobs(self, rows: Any) -> Any:
            return computed

    assert bridge.run_columns(Known(), Known.old_logprobs, batch) == ("old_logprobs",)
    if rank == 0:
        assert torch.equal(
            queue.get(batch, ["old_logprobs"])["old_logprobs"].values(), computed["old_logprobs"].values()
        )
        return
    with pytest.raises(QueueError):
        queue.get(batch, ["old_logprobs"])


def test_a_missing_column_is_named(make_actor: Any, queue: Queue, batch: BatchMeta) -> None:
    actor = make_actor()
    actor.queue = queue
    with pytest.raises(QueueError, match="old_logprobs"):
        bridge.run_update(actor, Actor.update, batch, step=1)


def test_every_stage_that_workers_compute_has_one_method_per_worker() -> None:
    found = [
        bridge.stage_of(method)
        for worker in (Actor, Critic, Reference, RewardModel)
        for method in vars(worker).values()
        if "stage" in getattr(method, "__dict__", {})
    ]
    expected = {stage.name for mode in dataflow.MODES.values() for stage in mode.stages}
    assert {stage.name for stage in found} == expected - {"rollout.generate", "advantages.estimate"}


class Echo:
    """The smallest worker: adds one to the advantages, as values."""

    features, ranks = Features(), Ranks(0, 1)

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    @bridge.implements(Stage("echo.add", {"advantages": lambda f: True}, {"values": lambda f: True}))
    def add_one(self, rows: Any) -> dict[str, Any]:
        return {"values": rows["advantages"] + 1}

    @bridge.implements(Stage("echo.stray", {"advantages": lambda f: True}, {"values": lambda f: True}))
    def stray(self, rows: Any) -> dict[str, Any]:
        return {"returns": rows["advantages"]}

    def plain(self, rows: Any) -> dict[str, Any]:
        return {}


def test_a_column_that_was_not_declared_is_refused(queue: Queue, batch: BatchMeta) -> None:
    with pytest.raises(AssertionError, match="returns"):
        bridge.run_columns(Echo(queue), Echo.stray, batch)


def test_a_method_without_a_stage_is_refused(queue: Queue, batch: BatchMeta) -> None:
    with pytest.raises(AssertionError, match="implements no stage"):
        bridge.run_columns(Echo(queue), Echo.plain, batch)


@pytest.mark.slow
def test_a_thousand_calls_leak_neither_descriptors_nor_threads(queue: Queue, batch: BatchMeta) -> None:
    worker, process = Echo(queue), psutil.Process()

    def held() -> tuple[int, int]:
        return process.num_fds(), threading.active_count()

    for _ in range(20):
        bridge.run_columns(worker, Echo.add_one, batch)
    before = held()
    for _ in range(1000):
        bridge.run_columns(worker, Echo.add_one, batch)
    assert all(after <= earlier for after, earlier in zip(held(), before, strict=True))  # the collector may close some
