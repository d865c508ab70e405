"""The storage contract for the life of rows: tags and waits, memory that is freed, snapshots, many processes."""

from __future__ import annotations

import asyncio
import glob
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import ray
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tqppo.contracts.storage_model import QueueMachine
from tqppo.contracts.storage_rows import MIB, Producer, check_ragged, consume, keys
from tqppo.errors import CheckpointError, DeadlineExceeded, QueueError
from tqppo.queue.client import BatchMeta, Queue
from tqppo.space import SHARED_MEMORY

WINDOWS = 3


# -- tags, listing, waiting ------------------------------------------------------------------------------------------


def test_tags_merge_and_filter(queue: Queue) -> None:
    queue.put(keys(3), {"check_number": torch.zeros(3)}, tags=[{"order": i, "kind": "a"} for i in range(3)])
    queue.tag({"row1_0_0": {"kind": "b"}, "marker": {"is_prompt": True}})
    assert queue.list(where={"kind": "b"}).tags == ({"order": 1, "kind": "b"},)
    assert queue.list(where={"order": (0, 2)}).keys == ("row0_0_0", "row2_0_0")
    rows = queue.list(where={"is_prompt": None})
    assert rows.columns == ("check_number",)
    assert len(rows) == 3
    again = queue.put(rows.keys, {"check_json": [0, 1, 2]})
    assert again.tags == rows.tags


def test_a_cursor_lists_what_changed_since(queue: Queue) -> None:
    queue.tag({"a": {"n": 1}, "b": {"n": 1}})
    before = queue.list()
    queue.tag({"b": {"n": 2}, "c": {"n": 1}})
    assert set(queue.list(cursor=before.cursor).keys) == {"b", "c"}


def test_a_wait_ends_when_the_last_row_is_ready(queue: Queue) -> None:
    async def work() -> BatchMeta:
        waiting = asyncio.ensure_future(queue.aio.wait(["a", "b"], timeout_s=20))
        await asyncio.sleep(0.05)
        await queue.aio.tag({"a": {"status": "finished"}})
        assert not waiting.done()
        await queue.aio.tag({"b": {"status": "failed"}})
        return await waiting

    assert asyncio.run(work()).tags == ({"status": "finished"}, {"status": "failed"})


def test_a_wait_that_ends_at_its_deadline_names_what_is_missing(queue: Queue) -> None:
    queue.tag({"a": {"status": "finished"}, "b": {"status": "running"}})
    with pytest.raises(DeadlineExceeded, match=r"1 of 3.*b \(status='running'\).*c \(no such row"):
        queue.wait(["a", "b", "c"], timeout_s=0.1)
    assert queue.wait(["a", "b", "c"], at_least=1).keys == ("a",)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_put_over_budget_waits_and_says_what_fills_the_node(cluster: None, backend_name: str) -> None:
    queue = Queue.create(backend_name, budget_bytes=4 * MIB, timeout_s=20)
    image = torch.zeros(3, 1, 512, 512)  # 3 MiB
    first = queue.put(keys(3), {"check_image": image})
    with pytest.raises(DeadlineExceeded, match=r"3,14\d,\d+ .*3 rows of 'train' × check_image"):
        queue.put(keys(3, "late"), {"check_image": image}, timeout_s=0.2)
    with pytest.raises(QueueError, match="never fit"):
        queue.put(keys(6, "huge"), {"check_image": torch.cat([image, image])})

    async def work() -> BatchMeta:
        second = asyncio.ensure_future(queue.aio.put(keys(3, "next"), {"check_image": image}))
        await asyncio.sleep(0.1)
        assert not second.done()
        await queue.aio.clear(first)
        return await second

    batch = asyncio.run(work())
    assert torch.equal(queue.get(batch, ["check_image"])["check_image"], image)
    assert queue.list().keys == batch.keys
    queue.close()


def test_a_cancelled_put_leaves_no_trace_and_delays_no_other(cluster: None, backend_name: str) -> None:
    queue = Queue.create(backend_name, budget_bytes=4 * MIB, timeout_s=20)
    first = queue.put(keys(3), {"check_image": torch.zeros(3, 1, 512, 512)})  # 3 MiB

    async def cancelled() -> None:
        late = asyncio.ensure_future(queue.aio.put(keys(2, "late"), {"check_image": torch.zeros(2, 1, 512, 512)}))
        waiting = asyncio.ensure_future(queue.aio.wait(["never"]))
        await asyncio.sleep(0.3)
        for each in (late, waiting):
            assert not each.done()
            each.cancel()
        await asyncio.wait({late, waiting})
        assert late.cancelled()

    asyncio.run(cancelled())
    small = queue.put(keys(1, "small"), {"check_number": torch.ones(1)}, timeout_s=10)
    queue.clear(first)
    assert queue.list().keys == small.keys
    queue.clear(small)
    assert queue.stats()["bytes"] == 0
    queue.close()


def test_clearing_part_of_a_block_gives_memory_back(queue: Queue) -> None:
    image = torch.randn(64, 1, 128, 128)  # 4 MiB
    texts = [torch.arange(i) for i in range(64)]
    batch = queue.put(keys(64), {"check_image": image, "check_tokens": texts, "check_json": list(range(64))})
    queue.put(batch, {"check_number": torch.arange(64.0)})
    left = batch.take([5, 41])
    queue.clear(batch.take(i for i in range(64) if i not in (5, 41)))
    assert queue.stats()["bytes"] < MIB // 2
    found = queue.get(left, ["check_image", "check_tokens", "check_json", "check_number"])
    assert torch.equal(found["check_image"], image[[5, 41]])
    check_ragged(found["check_tokens"], [texts[5], texts[41]], "int64")
    assert (found["check_json"], found["check_number"].tolist()) == ([5, 41], [5.0, 41.0])


def test_handles_and_threads_stay_constant_over_a_thousand_cycles(queue: Queue) -> None:
    def cycle(i: int) -> None:
        batch = queue.put([f"cycle{i}"], {"check_tokens": [torch.arange(50)], "check_number": torch.ones(1)})
        queue.get(batch, ["check_tokens", "check_number"])
        queue.clear(batch)

    async def async_cycle(i: int) -> None:
        batch = await queue.aio.put([f"cycle{i}"], {"check_json": [i]})
        await queue.aio.get(batch, ["check_json"])
        await queue.aio.clear(batch)

    loop = asyncio.new_event_loop()
    try:
        for each in (cycle, lambda i: loop.run_until_complete(async_cycle(i))):
            _stay_constant(each)
    finally:
        loop.close()


def _stay_constant(cycle: Callable[[int], None]) -> None:
    """Ray itself opens handles and threads now and then; a leak shows in every window."""
    process, counts = psutil.Process(), []
    for num_cycles in (50, *[1000] * WINDOWS):
        for i in range(num_cycles):
            cycle(i)
        counts.append((process.num_fds(), process.num_threads()))
        if any(new[0] <= old[0] + 2 and new[1] <= old[1] + 2 for old, new in pairwise(counts)):
            return
    pytest.fail(f"handles and threads, after every thousand cycles: {counts}")


def test_nothing_is_left_after_close(cluster: None, backend_name: str) -> None:
    queue = Queue.create(backend_name, budget_bytes=64 * MIB, timeout_s=20)
    queue.put(keys(2), {"check_image": torch.randn(2, 3, 300, 300), "check_json": [1, 2]})
    queue.close()
    queue.close()
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        assert glob.glob(f"{folder}/*{queue.spec.run}*") == []
    deadline = time.monotonic() + 20  # Ray ends actors asynchronously
    while (left := _actors_of(queue)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    with pytest.raises(QueueError):
        queue.list()


def _actors_of(queue: Queue) -> list[str]:
    return [name for name in ray.util.list_named_actors() if queue.spec.run in name]


# -- on disk ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_restored_by_any_storage(queue: Queue, tmp_path: Path) -> None:
    texts = [torch.arange(n) for n in (3, 0, 40)]
    columns = {"check_tokens": texts, "check_image": torch.randn(3, 3, 400, 400), "check_json": ["a", None, {}]}
    batch = queue.put(keys(3), columns, tags=[{"order": i} for i in range(3)])
    queue.put(batch.take([2]), {"check_number": torch.ones(1)})
    queue.tag({"marker": {"is_prompt": True}}, partition="val")
    asyncio.run(queue.aio.snapshot(tmp_path / "saved"))
    queue.clear(batch)
    for storage, local in (("simple", True), (queue.storage, False)):
        target = queue if not local else Queue.create(storage, budget_bytes=64 * MIB, local=True)
        target.put(["other"], {"check_number": torch.ones(1)})
        target.restore(tmp_path / "saved")
        asyncio.run(target.aio.restore(tmp_path / "saved"))  # also over itself
        assert target.list().tags == batch.tags
        assert target.list("val").tags == ({"is_prompt": True},)
        found = target.get(batch, list(columns))
        check_ragged(found["check_tokens"], texts, "int64")
        assert torch.equal(found["check_image"], columns["check_image"])  # type: ignore[arg-type]
        assert found["check_json"] == columns["check_json"]
        if local:
            target.close()


def test_a_snapshot_is_whole_though_rows_come_and_go(queue: Queue, tmp_path: Path) -> None:
    is_done = threading.Event()

    def come_and_go(name: str) -> None:
        i = 0
        while not is_done.is_set():
            batch = queue.put(keys(2, f"{name}{i}"), {"check_tokens": [torch.full((50_000,), i)] * 2})
            queue.clear(batch)
            i += 1

    kept = queue.put(keys(2), {"check_tokens": [torch.arange(60_000), torch.arange(3)]})
    with ThreadPoolExecutor(2) as threads:
        ended = [threads.submit(come_and_go, name) for name in "ab"]
        try:
            for i in range(4):
                queue.snapshot(tmp_path / f"saved{i}")
        finally:
            is_done.set()
        for each in ended:
            each.result()
    for i in range(4):
        queue.restore(tmp_path / f"saved{i}")
        batch = queue.list()
        assert set(kept.keys) <= set(batch.keys)
        found = queue.get(batch, ["check_tokens"])["check_tokens"].unbind()
        rows = dict(zip(batch.keys, found, strict=True))
        check_ragged(queue.get(kept, ["check_tokens"])["check_tokens"], [rows[key] for key in kept.keys], "int64")
        assert all(len(set(rows[key].tolist())) == 1 for key in set(batch.keys) - set(kept.keys))


def test_a_damaged_snapshot_is_refused(queue: Queue, tmp_path: Path) -> None:
    batch = queue.put(keys(2), {"check_number": torch.ones(2)})
    queue.snapshot(tmp_path / "saved")
    (block,) = (tmp_path / "saved").glob("*.tqb")
    block.write_bytes(block.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=block.name):
        queue.restore(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="no snapshot"):
        queue.restore(tmp_path)
    assert queue.list().keys == batch.keys


# -- many processes, any order ---------------------------------------------------------------------------------------


def test_producers_and_consumers_in_several_processes(queue: Queue) -> None:
    names = ["p", "q"]
    producers = [Producer.remote() for _ in names]  # type: ignore[attr-defined]
    done = [consume.remote(queue, name, 12) for name in names]
    made = [producer.produce.remote(queue, name, 12) for producer, name in zip(producers, names, strict=True)]
    ray.get([*done, *made], timeout=200)  # processes are started first
    for producer in producers:
        ray.kill(producer)  # what a producer has put stays
    batch = queue.list(where={"is_prompt": None}).in_order()
    assert len(batch) == 12 * len(names)
    assert queue.get(batch, ["check_number"])["check_number"].tolist() == [float(i) for i in range(12) for _ in names]
    check_ragged(
        queue.get(batch, ["check_tokens"])["check_tokens"],
        [torch.full((i,), i) for i in range(12) for _ in names],
        "int64",
    )


def test_any_order_of_operations_does_what_a_dictionary_would(queue: Queue, tmp_path: Path) -> None:
    run_state_machine_as_test(
        lambda: QueueMachine(queue, tmp_path),  # type: ignore[arg-type]
        settings=settings(
            max_examples=10, stateful_step_count=25, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],  # shrinking would take minutes
        ),
    )  # fmt: skip
