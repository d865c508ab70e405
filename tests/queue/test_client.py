"""The queue in one process, without Ray."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tqppo.algorithms.padding import padding_rows
from tqppo.columns import Column, Kind, declare
from tqppo.errors import CheckpointError, DeadlineExceeded, QueueError
from tqppo.queue.client import BatchMeta, Jagged, Queue
from tqppo.queue.link.calls import run

declare(Column("client_row", Kind.ROW, "any"))
declare(Column("client_tokens", Kind.RAGGED, "any"))
MIB = 1 << 20


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue.create("simple", budget_bytes=64 << 20, local=True)
    yield made
    made.close()


def test_columns_of_several_dimensions_and_their_padding_go_through_the_queue(queue: Queue) -> None:
    declare(Column("client_image", Kind.ROW, "float32", trailing=(3, None, None)))
    declare(Column("client_positions", Kind.RAGGED, "int64", trailing=(3,), ragged_dim=1))
    declare(Column("client_experts", Kind.RAGGED, "int16", trailing=(None, None)))
    lengths = (5, 0, 2)
    columns = {
        "client_positions": [torch.arange(3 * n).view(3, n) for n in lengths],
        "client_experts": [torch.arange(8 * n, dtype=torch.int16).view(n, 4, 2) for n in lengths],
        "client_image": torch.randn(3, 3, 8, 8),
    }
    batch = queue.put(["a_0_0", "b_0_0", "c_0_0"], columns)
    padding = padding_rows(2, {"client_positions": (3,), "client_experts": (4, 2), "client_image": (3, 8, 8)})
    padded = queue.put(padding.keys, padding.columns, tags=padding.tags)
    found = queue.get(BatchMeta.join([batch, padded]), list(columns))
    for name in ("client_positions", "client_experts"):
        rows = found[name].unbind()
        assert all(torch.equal(row, given) for row, given in zip(rows[:3], columns[name], strict=True))
        assert not any(row.any() for row in rows[3:])
    assert [tuple(row.shape) for row in found["client_positions"].unbind()] == [(3, 5), (3, 0), (3, 2), (3, 0), (3, 0)]
    assert torch.equal(found["client_image"][:3], columns["client_image"])  # type: ignore[arg-type]
    assert not found["client_image"][3:].any()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"client_row": [[1], [2, 3]]},
        {"client_row": ["a", "b"]},
        {"client_row": [torch.zeros(2), torch.zeros(3)]},
        {"client_row": np.array(["a", "b"])},
        {"client_row": Jagged(torch.zeros(2), [1, 1])},
        {"client_row": torch.eye(2).to_sparse()},
        {"client_tokens": [torch.zeros(2), None]},
        {"client_tokens": Jagged(torch.zeros(2), ["a", "b"])},
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_names_its_column(queue: Queue, columns: dict[str, Any]) -> None:
    with pytest.raises(QueueError, match=f"column '{next(iter(columns))}'"):
        queue.put(["a", "b"], columns)
    assert len(queue.list()) == 0


def test_strided_and_conjugated_values_come_back_equal(queue: Queue) -> None:
    turned = np.arange(6.0).reshape(2, 3)[:, ::-1]
    declare(Column("client_pair", Kind.ROW, "any", trailing=(None,)))
    batch = queue.put(["a", "b"], {"client_pair": turned, "client_row": torch.tensor([1 + 2j, 3j]).conj()})
    found = queue.get(batch, ["client_pair", "client_row"])
    assert found["client_pair"].tolist() == turned.tolist()
    assert found["client_row"].tolist() == [1 - 2j, -3j]


@pytest.mark.parametrize("keys", ["ab", [1, 2], ["a", None], ["a", "a"], iter("ab")])
def test_keys_are_a_list_of_strings_each_once(queue: Queue, keys: Any) -> None:
    with pytest.raises(QueueError, match="keys"):
        queue.put(keys, {"client_row": torch.zeros(2)})
    with pytest.raises(QueueError, match="keys"):
        queue.wait(keys, timeout_s=0.0)


@pytest.mark.parametrize("tag", [{"x": {1}}, {"x": object()}, {"\0locator": 1}, {"x": [{'\0"': 1}]}, 5])
def test_tags_are_json(queue: Queue, tag: Any) -> None:
    with pytest.raises(QueueError, match="'a'"):
        queue.put(["a"], {"client_row": torch.zeros(1)}, tags=[tag])
    with pytest.raises(QueueError, match="'a'"):
        queue.tag({"a": tag})
    assert len(queue.list()) == 0


@pytest.mark.parametrize("text", ['say "\0"', "\0", "\0locator", '\0\\": 1', "\ud800"])
def test_any_text_may_be_a_tag(queue: Queue, text: str) -> None:
    queue.tag({"a": {"x": text, "more": [text, {"y": text}]}})
    assert queue.list().tags == ({"x": text, "more": [text, {"y": text}]},)


def test_tags_come_back_as_from_json_and_callers_may_change_them(queue: Queue) -> None:
    batch = queue.put(["a"], {"client_row": torch.zeros(1)}, tags=[{"pair": (1, 2), "number": np.float32(0.5)}])
    assert batch.tags == ({"pair": [1, 2], "number": 0.5},)
    queue.list().tags[0]["pair"] = "changed"  # type: ignore[index]
    assert queue.list(where={"number": {0.5, 1.5}}).tags == batch.tags


def test_an_append_needs_existing_rows(queue: Queue) -> None:
    batch = queue.put(["a", "b"], {"client_row": torch.zeros(2)}, partition="val")
    with pytest.raises(QueueError, match=r"'val'.*'train'"):
        queue.put(batch, {"client_tokens": [[1], [2]]}, partition="train")
    with pytest.raises(QueueError, match="2 keys were given 1 tags"):
        queue.put(batch, {"client_tokens": [[1], [2]]}, tags=[{}])
    queue.clear(batch.take([1]))
    with pytest.raises(QueueError, match="'b'"):
        queue.put(batch, {"client_tokens": [[1], [2]]})
    assert queue.list("val").keys == ("a",)
    assert queue.list("val").columns == ("client_row",)


# -- memory ----------------------------------------------------------------------------------------------------------


def storage_of(queue: Queue) -> Any:
    return run(queue.aio.connection.storage())


def in_memory(queue: Queue) -> int:
    files = storage_of(queue)._here()
    return sum(size for part in ("live", "free") for _, size in files.files(part))


def test_puts_that_wait_write_nothing_before_there_is_room() -> None:
    queue, most = Queue.create(budget_bytes=8 * MIB, timeout_s=20, local=True), 0
    first = queue.put(["first"], {"client_row": torch.zeros(1), "client_tokens": [torch.zeros(7 * MIB // 4)]})

    async def one(i: int) -> None:
        nonlocal most
        batch = await queue.aio.put([f"k{i}"], {"client_tokens": [torch.zeros(3 * MIB // 4)]})
        most = max(most, in_memory(queue))
        await asyncio.sleep(0.01)
        await queue.aio.clear(batch)

    async def work() -> None:
        waiting = [asyncio.ensure_future(one(i)) for i in range(20)]
        await asyncio.sleep(0.1)
        assert in_memory(queue) < 8 * MIB
        await queue.aio.clear(first)
        await asyncio.gather(*waiting)

    asyncio.run(work())
    assert 3 * MIB < most <= 8 * MIB + 1000
    assert queue.stats()["bytes"] == 0
    queue.close()


def test_a_put_ends_at_its_deadline(queue: Queue) -> None:
    queue.put(["a"], {"client_tokens": [torch.zeros(15 * MIB)]})
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"Held by .*1 rows of 'train' × client_tokens"):
        queue.put(["b"], {"client_tokens": [torch.zeros(MIB)]}, timeout_s=0.3)
    assert time.monotonic() - began < 3


def test_a_batch_of_very_many_blocks_takes_few_handles(queue: Queue) -> None:
    keys = [f"k{i}" for i in range(150)]
    for i, key in enumerate(keys):
        queue.put([key], {"client_tokens": [torch.full((40_000,), i)]})
    batch = BatchMeta("train", tuple(keys))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 150, allowed[1]))
    try:
        found = queue.get(batch, ["client_tokens"])["client_tokens"].unbind()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert [int(row[-1]) for row in found] == list(range(150))


def test_a_write_that_fails_releases_its_room_and_raises_its_own_error(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(block: Any) -> None:
        raise QueueError("node out of memory")

    link = queue.aio.connection.link
    call = link.call

    async def failing(method: str, *args: Any, timeout_s: float) -> Any:
        if method == "release":
            raise QueueError("the index is gone")
        return await call(method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(storage_of(queue), "write", full)
    with pytest.raises(QueueError, match="out of memory"):
        queue.put(["a"], {"client_tokens": [torch.zeros(MIB)]})
    assert queue.stats()["bytes"] == 0
    monkeypatch.setattr(link, "call", failing)
    with pytest.raises(QueueError, match="out of memory"):
        queue.put(["a"], {"client_tokens": [torch.zeros(MIB)]})


def test_rows_are_cleared_though_their_block_cannot_be_compacted(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"k{i}" for i in range(8)]
    batch = queue.put(keys, {"client_tokens": [torch.zeros(MIB // 4)] * 8})

    async def full(block: Any) -> None:
        raise QueueError("node out of memory")

    monkeypatch.setattr(storage_of(queue), "write", full)
    queue.clear(batch.take(range(7)))
    assert queue.list().keys == ("k7",)
    assert len(queue.get(batch.take([7]), ["client_tokens"])["client_tokens"].values()) == MIB // 4


def test_a_snapshot_over_budget_and_a_damaged_one_are_refused_and_change_nothing(queue: Queue, tmp_path: Path) -> None:
    queue.put(["a"], {"client_tokens": [torch.zeros(MIB)]})
    queue.snapshot(tmp_path / "saved")
    small = Queue.create(budget_bytes=MIB, local=True)
    kept = small.put(["kept"], {"client_row": torch.ones(1)})
    with pytest.raises(CheckpointError, match="budget"):
        small.restore(tmp_path / "saved")
    index = tmp_path / "saved" / "queue.json"
    index.write_text(index.read_text().replace('"a"', '"b"'))
    with pytest.raises(CheckpointError, match="checksum"):
        queue.restore(tmp_path / "saved")
    assert queue.list().keys == ("a",)
    assert small.get(kept, ["client_row"])["client_row"].tolist() == [1.0]
    small.close()


# -- threads and forks -----------------------------------------------------------------------------------------------


def test_many_threads_may_share_a_handle(queue: Queue) -> None:
    def work(name: str) -> None:
        for i in range(60):
            size = (100, 40_000, 300_000)[i % 3]
            batch = queue.put([f"{name}{i}", f"{name}{i}b"], {"client_tokens": [torch.full((size,), i)] * 2})
            for order in ([0, 1], [1, 0]):
                found = queue.get(batch.take(order), ["client_tokens"])["client_tokens"].values()
                assert len(found) == 2 * size
                assert (found == i).all()
            queue.clear(batch)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, "abcdef"))
    sys.setswitchinterval(switch)
    assert queue.stats()["bytes"] == 0


FORKED = """
import os, sys, torch
from tqppo.queue.client import Queue
queue = Queue.create(budget_bytes=1 << 26, local=True)
batch = queue.put(["a"], {"tokens": [torch.ones(100_000, dtype=torch.int64)]})
child = os.fork()
if child == 0:
    queue.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert int(queue.get(batch, ["tokens"])["tokens"].values().sum()) == 100_000
queue.put(["b"], {"tokens": [torch.ones(100_000, dtype=torch.int64)]})
folder = queue.aio.connection._storage._here().folder
queue.close()
assert not folder.exists()
print("all is well")
"""


@pytest.mark.slow
def test_a_forked_child_that_ends_leaves_the_queue_alone() -> None:
    """Runs in a process of its own, because this one has threads."""
    command = [sys.executable, "-c", FORKED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "all is well\n", ended.stderr
