"""What every storage must do, checked through the queue that it serves: exact bytes, strict errors, bounded memory.

`tqppo backends check storage NAME` runs it. A test file may import everything from here and redefine `backend_name`.
"""

from __future__ import annotations

import asyncio
import glob
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from tqppo.columns import Column, Kind, declare
from tqppo.contracts.storage_model import QueueMachine
from tqppo.errors import CheckpointError, DeadlineExceeded, QueueError
from tqppo.queue.client import BatchMeta, Jagged, Queue

MIB = 1 << 20
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
LENGTHS = ([3, 3, 3], [1], [5, 2], [0, 4, 0], [0], [0, 0])

declare(Column("check_tokens", Kind.RAGGED, "any"))
declare(Column("check_wide", Kind.RAGGED, "any", trailing=(None, None)))
declare(Column("check_positions", Kind.RAGGED, "int64", ragged_dim=1))
declare(Column("check_number", Kind.ROW, "any"))
declare(Column("check_image", Kind.ROW, "any", trailing=(None, None, None)))
declare(Column("check_json", Kind.JSON))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """The Ray that runs already, or a private one."""
    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=512 * MIB)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_queue(cluster: None, backend_name: str) -> Iterator[Queue]:
    queue = Queue.create(backend_name, budget_bytes=256 * MIB, timeout_s=30)
    yield queue
    queue.close()


@pytest.fixture
def queue(shared_queue: Queue) -> Iterator[Queue]:
    """An empty queue; the test may leave rows in it."""
    yield shared_queue
    for partition in shared_queue.stats()["partitions"]:
        shared_queue.clear(shared_queue.list(partition))
    left = shared_queue.stats()
    assert (left["rows"], left["bytes"], left["blocks"]) == (0, 0, 0)


def keys(count: int, name: str = "row") -> list[str]:
    return [f"{name}{i}_0_0" for i in range(count)]


def numbers(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, dtype))


def check_ragged(found: Tensor, rows: Sequence[Tensor], dtype: str) -> None:
    assert found.layout is torch.jagged
    assert found.dtype is getattr(torch, dtype)
    assert len(found.unbind()) == len(rows)
    for one, other in zip(found.unbind(), rows, strict=True):
        assert torch.equal(one, other)


# -- what goes in comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_exactly(queue: Queue, dtype: str) -> None:
    rows = [numbers(n, dtype=dtype, seed=n) for n in (4, 0, 7)]
    wide = [numbers(n, 2, 3, dtype=dtype, seed=n) for n in (1, 5, 0)]
    image = numbers(3, 2, 5, 4, dtype=dtype)
    batch = queue.put(keys(3), {"check_tokens": rows, "check_wide": wide, "check_image": image})
    found = queue.get(batch, ["check_image", "check_wide", "check_tokens"])
    check_ragged(found["check_tokens"], rows, dtype)
    check_ragged(found["check_wide"], wide, dtype)
    assert torch.equal(found["check_image"], image)
    assert list(found) == ["check_image", "check_wide", "check_tokens"]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_ragged_columns_are_jagged_whatever_their_lengths(queue: Queue, lengths: list[int]) -> None:
    rows = [numbers(n, dtype="int64", seed=n) for n in lengths]
    turned = [numbers(3, n, dtype="int64", seed=n) for n in lengths]
    names = keys(len(lengths))
    batch = queue.put(names, {"check_tokens": Jagged(torch.cat(rows), lengths), "check_positions": turned})
    for order in (list(range(len(names))), list(reversed(range(len(names))))):
        found = queue.get(batch.take(order), ["check_tokens", "check_positions"])
        check_ragged(found["check_tokens"], [rows[i] for i in order], "int64")
        check_ragged(found["check_positions"], [turned[i] for i in order], "int64")


def test_nested_tensors_go_in_as_they_are(queue: Queue) -> None:
    rows = [numbers(n, dtype="float32", seed=n) for n in (2, 6, 1)]
    whole = torch.nested.nested_tensor(rows, layout=torch.jagged)
    narrowed = torch.nested.narrow(torch.arange(12).view(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2]),
                                   layout=torch.jagged)  # fmt: skip
    batch = queue.put(keys(3), {"check_tokens": whole})
    check_ragged(queue.get(batch, ["check_tokens"])["check_tokens"], rows, "float32")
    queue.put(batch, {"check_tokens": narrowed})
    check_ragged(queue.get(batch, ["check_tokens"])["check_tokens"], list(narrowed.unbind()), "int64")


def test_rows_of_many_puts_and_scattered_rows_are_gathered_in_the_order_asked(queue: Queue) -> None:
    rows = {key: numbers(20 * i % 57, dtype="int32", seed=i) for i, key in enumerate(keys(40))}
    order = [f"row{(i * 17) % 40}_0_0" for i in range(40)]
    for start in range(0, 40, 5):
        part = list(rows)[start : start + 5]
        numbered = torch.tensor([float(i) for i in range(start, start + 5)])
        values = {"check_tokens": [rows[key] for key in part], "check_number": numbered, "check_json": part}
        queue.put(part, values)
    for wanted in (order, order[:13], order[:1]):
        found = queue.get(BatchMeta("train", tuple(wanted)), ["check_tokens", "check_number", "check_json"])
        check_ragged(found["check_tokens"], [rows[key] for key in wanted], "int32")
        assert found["check_number"].tolist() == [float(list(rows).index(key)) for key in wanted]
        assert found["check_json"] == wanted


def test_json_holds_small_data_of_any_shape(queue: Queue) -> None:
    values: list[Any] = [{"a": [1, 2.5, None]}, "zażółć", [], None, {"nested": {"deep": True}}]
    batch = queue.put(keys(5), {"check_json": values})
    assert queue.get(batch, ["check_json"])["check_json"] == values


def test_large_tensors_come_back_exactly(queue: Queue) -> None:
    image = torch.randn(6, 3, 512, 512)  # 18 MiB
    batch = queue.put(keys(6), {"check_image": image})
    assert torch.equal(queue.get(batch, ["check_image"])["check_image"], image)
    scattered = [4, 0, 5]
    assert torch.equal(queue.get(batch.take(scattered), ["check_image"])["check_image"], image[scattered])


def test_no_rows_give_empty_columns(queue: Queue) -> None:
    found = queue.get(BatchMeta("train", ()), ["check_positions", "check_number", "check_json"])
    assert found["check_positions"].layout is torch.jagged
    assert len(found["check_number"]) == 0
    assert found["check_json"] == []


def test_a_column_put_again_replaces_the_first(queue: Queue) -> None:
    batch = queue.put(keys(3), {"check_number": torch.tensor([1.0, 2.0, 3.0]), "check_json": [1, 2, 3]})
    queue.put(batch.take([1]), {"check_number": torch.tensor([9.0])})
    found = queue.get(batch, ["check_number", "check_json"])
    assert found["check_number"].tolist() == [1.0, 9.0, 3.0]
    assert found["check_json"] == [1, 2, 3]


def test_results_may_be_changed_and_outlive_their_rows(queue: Queue) -> None:
    first = torch.randn(4, 3, 128, 128)
    batch = queue.put(keys(4), {"check_image": first})
    mine = queue.get(batch, ["check_image"])["check_image"]
    other = queue.get(batch, ["check_image"])["check_image"]
    mine += 1
    assert torch.equal(other, first)
    queue.clear(batch)
    for i in range(3):  # would be written over the same memory
        queue.clear(queue.put(keys(4), {"check_image": torch.full_like(first, i)}))
    assert torch.equal(mine, first + 1)
    assert torch.equal(other, first)


# -- strictness ------------------------------------------------------------------------------------------------------


def test_unknown_keys_and_columns_are_named(queue: Queue) -> None:
    batch = queue.put(keys(3), {"check_number": torch.zeros(3)})
    with pytest.raises(QueueError, match="stranger"):
        queue.get(BatchMeta("train", (*batch.keys, "stranger")), ["check_number"])
    with pytest.raises(QueueError, match="check_json"):
        queue.get(batch, ["check_number", "check_json"])
    with pytest.raises(QueueError, match="stranger"):
        queue.clear(BatchMeta("train", (*batch.keys, "stranger")))
    with pytest.raises(QueueError, match="elsewhere"):
        queue.get(BatchMeta("elsewhere", batch.keys), ["check_number"])
    assert len(queue.list()) == 3


def test_a_column_missing_on_one_row_is_an_error_that_names_both(queue: Queue) -> None:
    batch = queue.put(keys(3), {"check_number": torch.zeros(3)})
    queue.put(batch.take([0, 2]), {"check_json": [1, 2]})
    with pytest.raises(QueueError, match=r"check_json.*row1_0_0"):
        queue.get(batch, ["check_json"])


@pytest.mark.parametrize(
    "columns",
    [
        {"check_number": torch.zeros(2)},
        {"check_tokens": Jagged(torch.zeros(5), [1, 2, 3])},
        {"check_positions": [torch.zeros(3, 2)] * 3},
        {"check_undeclared": torch.zeros(3)},
        {"check_json": [object()] * 3},
        {"check_tokens": torch.zeros(3, 4)},
        {},
    ],
)
def test_a_refused_put_leaves_nothing_behind(queue: Queue, columns: dict[str, Any]) -> None:
    with pytest.raises(QueueError):
        queue.put(keys(3), columns)
    assert len(queue.list()) == 0


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
        waiting = asyncio.ensure_future(queue.await_(["a", "b"], timeout_s=20))
        await asyncio.sleep(0.05)
        await queue.atag({"a": {"status": "finished"}})
        assert not waiting.done()
        await queue.atag({"b": {"status": "failed"}})
        return await waiting

    assert asyncio.run(work()).tags == ({"status": "finished"}, {"status": "failed"})


def test_a_wait_that_ends_at_its_deadline_names_what_is_missing(queue: Queue) -> None:
    queue.tag({"a": {"status": "finished"}, "b": {"status": "running"}})
    with pytest.raises(DeadlineExceeded, match=r"1 of 3.*b \(status='running'\).*c \(no such row"):
        queue.wait(["a", "b", "c"], timeout_s=0.1)
    assert queue.wait(["a", "b", "c"], at_least=1).keys == ("a",)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_put_over_budget_waits_and_says_who_holds_what(cluster: None, backend_name: str) -> None:
    queue = Queue.create(backend_name, budget_bytes=4 * MIB, timeout_s=20)
    image = torch.zeros(3, 1, 512, 512)  # 3 MiB
    first = queue.put(keys(3), {"check_image": image})
    with pytest.raises(DeadlineExceeded, match=r"3,14\d,\d+ .*3 rows of 'train' × check_image"):
        queue.put(keys(3, "late"), {"check_image": image}, timeout_s=0.2)
    with pytest.raises(QueueError, match="never fit"):
        queue.put(keys(6, "huge"), {"check_image": torch.cat([image, image])})

    async def work() -> BatchMeta:
        second = asyncio.ensure_future(queue.aput(keys(3, "next"), {"check_image": image}))
        await asyncio.sleep(0.1)
        assert not second.done()
        await queue.aclear(first)
        return await second

    batch = asyncio.run(work())
    assert torch.equal(queue.get(batch, ["check_image"])["check_image"], image)
    assert queue.list().keys == batch.keys
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

    async def cycles(start: int, stop: int) -> None:
        for i in range(start, stop):
            batch = await queue.aput([f"cycle{i}"], {"check_json": [i]})
            await queue.aget(batch, ["check_json"])
            await queue.aclear(batch)

    async def counted() -> tuple[int, int]:
        await cycles(0, 30)
        before = process.num_fds(), process.num_threads()
        await cycles(30, 330)
        return before

    process = psutil.Process()
    for i in range(50):
        cycle(i)
    handles, threads = process.num_fds(), process.num_threads()
    for i in range(700):
        cycle(i)
    assert process.num_fds() <= handles + 2
    assert process.num_threads() <= threads + 2
    handles, threads = asyncio.run(counted())
    assert process.num_fds() <= handles + 2
    assert process.num_threads() <= threads + 2


def test_nothing_is_left_after_close(cluster: None, backend_name: str) -> None:
    queue = Queue.create(backend_name, budget_bytes=64 * MIB, timeout_s=20)
    queue.put(keys(2), {"check_image": torch.randn(2, 3, 300, 300), "check_json": [1, 2]})
    queue.close()
    queue.close()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        assert glob.glob(f"{folder}/*{queue.spec.run}*") == []
    assert [name for name in ray.util.list_named_actors() if queue.spec.run in name] == []
    with pytest.raises(QueueError):
        queue.list()


# -- on disk ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_restored_by_any_storage(queue: Queue, tmp_path: Path) -> None:
    texts = [torch.arange(n) for n in (3, 0, 40)]
    columns = {"check_tokens": texts, "check_image": torch.randn(3, 3, 400, 400), "check_json": ["a", None, {}]}
    batch = queue.put(keys(3), columns, tags=[{"order": i} for i in range(3)])
    queue.put(batch.take([2]), {"check_number": torch.ones(1)})
    queue.tag({"marker": {"is_prompt": True}}, partition="val")
    queue.snapshot(tmp_path / "saved")
    queue.clear(batch)
    for storage, local in (("simple", True), (queue.storage, False)):
        target = queue if not local else Queue.create(storage, budget_bytes=64 * MIB, local=True)
        target.put(["other"], {"check_number": torch.ones(1)})
        target.restore(tmp_path / "saved")
        target.restore(tmp_path / "saved")  # also over itself
        assert target.list().tags == batch.tags
        assert target.list("val").tags == ({"is_prompt": True},)
        found = target.get(batch, list(columns))
        check_ragged(found["check_tokens"], texts, "int64")
        assert torch.equal(found["check_image"], columns["check_image"])  # type: ignore[arg-type]
        assert found["check_json"] == columns["check_json"]
        if local:
            target.close()


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


@ray.remote(num_cpus=0)
class Producer:
    """Puts rows one by one, then marks its prompt as finished."""

    async def produce(self, queue: Queue, name: str, count: int) -> None:
        for i in range(count):
            key = f"{name}_{i}_0"
            await queue.aput([key], {"check_tokens": [torch.full((i,), i)]}, tags=[{"uid": name, "session": i}])
        await queue.atag({name: {"is_prompt": True, "status": "finished", "rows": count}})


@ray.remote(num_cpus=0)
def consume(queue: Queue, name: str, count: int) -> None:
    """Waits for a prompt, checks its rows and adds a column to them."""
    queue.wait([name], timeout_s=60)
    batch = queue.list(where={"uid": name}).in_order()
    found = queue.get(batch, ["check_tokens"])["check_tokens"]
    check_ragged(found, [torch.full((i,), i) for i in range(count)], "int64")
    queue.put(batch, {"check_number": torch.arange(float(count))})


def test_producers_and_consumers_in_several_processes(queue: Queue) -> None:
    names = ["p", "q", "r"]
    producers = [Producer.remote() for _ in names]  # type: ignore[attr-defined]
    done = [consume.remote(queue, name, 12) for name in names]
    made = [producer.produce.remote(queue, name, 12) for producer, name in zip(producers, names, strict=True)]
    ray.get([*done, *made], timeout=90)
    for producer in producers:
        ray.kill(producer)  # what a producer has put stays
    batch = queue.list(where={"is_prompt": None}).in_order()
    assert len(batch) == 36
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
