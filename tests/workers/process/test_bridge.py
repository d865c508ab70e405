from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from tqppo.errors import QueueError
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.workers.actor import Actor
from tqppo.workers.compute.worker import Worker
from tqppo.workers.critic import Critic
from tqppo.workers.process.bridge import remote, remote_methods
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
    columns = direct.logprobs(rows)
    extended = bridged.logprobs(batch)
    assert set(extended.columns) == {*batch.columns, "old_logprobs"}
    stored = queue.get(extended, ["old_logprobs"])
    for name in stored:
        assert torch.equal(stored[name].values(), columns[name].values())
        assert stored[name].offsets().tolist() == columns[name].offsets().tolist()
    metrics = direct.update({**rows, "old_logprobs": columns["old_logprobs"]}, step=1, num_mini_batches=2)
    assert bridged.update(extended, step=1, num_mini_batches=2) == metrics


def test_tags_keys_and_order_stay(make_actor: Any, queue: Queue, batch: BatchMeta) -> None:
    actor = make_actor()
    actor.queue = queue
    extended = actor.logprobs(batch)
    assert (extended.keys, extended.tags, extended.partition) == (batch.keys, batch.tags, batch.partition)


def test_a_missing_column_is_named(make_actor: Any, queue: Queue, batch: BatchMeta) -> None:
    actor = make_actor()
    actor.queue = queue
    with pytest.raises(QueueError, match="old_logprobs"):
        actor.update(batch, step=1)


@pytest.mark.parametrize("role", [Actor, Critic, Reference, RewardModel])
def test_every_public_method_of_a_role_is_remote(role: type) -> None:
    inherited = {*dir(Worker), "tokens", "train", "optimizer", "report_names", "prefix", "has_kl"}
    public = {name for name in dir(role) if not name.startswith("_")} - inherited
    assert public == set(remote_methods(role))


class Echo:
    """The smallest worker: adds one to the advantages, as values."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    @remote(reads=("advantages",), writes=("values",))
    def add_one(self, rows: Any) -> dict[str, Any]:
        return {"values": rows["advantages"] + 1}

    @remote(reads=("advantages",), writes=("values",))
    def stray(self, rows: Any) -> dict[str, Any]:
        return {"returns": rows["advantages"]}


def test_a_column_that_was_not_declared_is_refused(queue: Queue, batch: BatchMeta) -> None:
    with pytest.raises(AssertionError, match="returns"):
        Echo(queue).stray(batch)


@pytest.mark.slow
def test_a_thousand_calls_leak_neither_descriptors_nor_threads(queue: Queue, batch: BatchMeta) -> None:
    worker, process = Echo(queue), psutil.Process()

    def held() -> tuple[int, int]:
        return process.num_fds(), threading.active_count()

    for _ in range(20):
        worker.add_one(batch)
    before = held()
    for _ in range(1000):
        worker.add_one(batch)
    assert held() == before
