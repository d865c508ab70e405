"""The calls of `queue.aio`, side by side in one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tqppo.columns import Column, Kind, declare
from tqppo.queue.aio import AsyncQueue
from tqppo.queue.client import Queue

declare(Column("aio_row", Kind.ROW, "float32"))


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue.create("simple", budget_bytes=64 << 20, local=True)
    yield made
    made.close()


def test_every_blocking_call_has_an_asynchronous_twin_with_the_same_parameters() -> None:
    calls = [name for name in vars(AsyncQueue) if not name.startswith("_")]
    assert calls == ["put", "get", "tag", "list", "wait", "clear", "stats", "snapshot", "restore"]
    for name in calls:
        assert inspect.signature(getattr(Queue, name)) == inspect.signature(getattr(AsyncQueue, name)), name


def test_a_wait_and_the_put_that_ends_it_share_an_event_loop(queue: Queue, tmp_path: Path) -> None:
    async def work() -> None:
        waiting = asyncio.ensure_future(queue.aio.wait(["a"], where={"status": "finished"}, timeout_s=20))
        await asyncio.sleep(0)
        batch = await queue.aio.put(["a"], {"aio_row": torch.ones(1)})
        assert not waiting.done()
        await queue.aio.tag({"a": {"status": "finished"}})
        assert (await waiting).keys == batch.keys
        assert (await queue.aio.get(batch, ["aio_row"]))["aio_row"].tolist() == [1.0]
        await queue.aio.snapshot(tmp_path / "saved")
        await queue.aio.clear(batch)
        assert (await queue.aio.stats())["rows"] == 0
        await queue.aio.restore(tmp_path / "saved")
        assert (await queue.aio.list()).keys == ("a",)

    asyncio.run(work())


def test_a_queue_lives_as_long_as_its_asynchronous_view() -> None:
    aio = Queue.create("simple", budget_bytes=1 << 20, local=True).aio
    assert asyncio.run(aio.stats())["rows"] == 0
    aio.connection.close()
