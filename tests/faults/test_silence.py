"""Processes that exist but do not answer, under the default deadline of a minute; and others that are only slow."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch
from faults.processes import index_of, lost_soon, stopped, storage_of, this_node

from tqppo.errors import DataLost, DeadlineExceeded
from tqppo.queue.client import BatchMeta, Queue
from tqppo.queue.link.replies import PING_WAIT_S, PING_WAITS, QUIET_S

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files

pytestmark = pytest.mark.slow
SLOW_S = QUIET_S + PING_WAITS * PING_WAIT_S + 1.5  # longer than a process may be unresponsive


@pytest.fixture(scope="module", params=["simple", "ray"])
def queue(request: pytest.FixtureRequest, local_ray: None) -> Iterator[Queue]:
    made = Queue.create(request.param, budget_bytes=64 << 20)
    yield made
    made.close()


@pytest.fixture
def rows(queue: Queue) -> Iterator[BatchMeta]:
    batch = queue.put(["a_0_0", "b_0_0"], columns())
    yield batch
    check(queue, batch)  # the queue works again after each test
    for partition in queue.stats()["partitions"]:
        queue.clear(queue.list(partition))


def columns() -> dict[str, Any]:
    return {"tokens": [torch.arange(100_000), torch.arange(3)], "reward": torch.ones(2)}


def check(queue: Queue, batch: BatchMeta) -> None:
    found = queue.get(batch, ["tokens", "reward"])
    assert [len(row) for row in found["tokens"].unbind()] == [100_000, 3]
    assert found["reward"].tolist() == [1.0, 1.0]


def all_lost_soon(calls: list[Callable[[], Any]], match: str, kind: type = DeadlineExceeded) -> None:
    """Calls made at the same time, from threads."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for ended in [threads.submit(lost_soon, call, match, kind) for call in calls]:
            ended.result()


@pytest.mark.parametrize("queue", ["ray"], indirect=True)  # of `simple`, only readers on other nodes: two_nodes.py
def test_an_unresponsive_storage_is_an_error_that_names_rows_and_node(queue: Queue, rows: BatchMeta) -> None:
    with stopped(storage_of(queue)):
        lost_soon(
            lambda: check(queue, rows), rf"tokens, reward.*'a_0_0', 'b_0_0'.*{this_node()}.*unresponsive", DataLost
        )
        all_lost_soon(
            [
                lambda: queue.put(["c_0_0"], {"reward": torch.ones(1)}),
                lambda: queue.put(["c_0_0"], {"tokens": [torch.arange(100_000)]}),
                lambda: asyncio.run(queue.aio.put(["c_0_0"], {"reward": torch.ones(1)})),
            ],
            rf"'c_0_0'.*not put.*{this_node()} is unresponsive",
            DataLost,
        )
        assert queue.list().keys == rows.keys


def test_an_unresponsive_index_is_an_error_of_every_call(queue: Queue, rows: BatchMeta) -> None:
    with ThreadPoolExecutor(1) as thread:
        early = thread.submit(queue.wait, ["never"], timeout_s=300)
        time.sleep(2 * QUIET_S)
        with stopped(index_of(queue)):
            all_lost_soon(
                [
                    early.result,
                    lambda: queue.wait(["never"], timeout_s=300),
                    lambda: check(queue, rows),
                    lambda: queue.put(["c_0_0"], {"reward": torch.ones(1)}),
                    lambda: queue.list(),
                    lambda: queue.stats(),
                    lambda: asyncio.run(queue.aio.get(rows, ["reward"])),
                    lambda: asyncio.run(queue.aio.wait(["never"], timeout_s=300)),
                ],
                "index is unresponsive",
            )


def test_a_long_wait_does_not_make_the_index_unresponsive(queue: Queue, rows: BatchMeta) -> None:
    with pytest.raises(DeadlineExceeded, match="still missing: 'never"):
        queue.wait(["never"], timeout_s=SLOW_S)
    with pytest.raises(DeadlineExceeded, match="still missing: 'never"):
        asyncio.run(queue.aio.wait(["never"], timeout_s=SLOW_S))


def test_a_slow_storage_is_waited_for(local_ray: None) -> None:
    class Slow(dict[str, Any]):
        def get(self, *args: Any) -> Any:
            time.sleep(SLOW_S)
            return super().get(*args)

    def slow_down(keeper: Any) -> None:
        keeper._held = Slow(keeper._held)

    queue = Queue.create("ray", budget_bytes=64 << 20)
    batch = queue.put(["a_0_0", "b_0_0"], columns())
    ray.get(storage_of(queue).__ray_call__.remote(slow_down))
    check(queue, batch)
    assert len(asyncio.run(queue.aio.get(batch, ["reward"]))["reward"]) == 2
    queue.close()
