"""The index alone: no bytes, no processes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from tqppo.errors import CheckpointError, DeadlineExceeded, QueueError
from tqppo.queue.index.answers import Published
from tqppo.queue.index.compaction import COMPACT_ABOVE_BYTES
from tqppo.queue.index.index import Index
from tqppo.queue.link.calls import Pending, run
from tqppo.queue.storage import Locator


class Freed(list[str]):
    """Records which blocks the index frees."""

    def __call__(self, locators: list[Locator]) -> None:
        self.extend(locator.block for locator in locators)


def make(limit: int = 1 << 30) -> tuple[Index, Freed]:
    freed = Freed()
    return Index(limit, freed), freed


def publish(
    index: Index, keys: list[str], columns: tuple[str, ...], block: str, size: int = 100, **more: object
) -> Published:
    async def work() -> Published:
        return await index.publish("train", keys, more.get("tags"), columns, Locator("here", block, size)).within(0.05)  # type: ignore[arg-type]

    return run(work())


def test_a_block_is_freed_with_its_last_cell() -> None:
    index, freed = make()
    publish(index, ["a", "b"], ("x", "y"), "one")
    publish(index, ["a", "b"], ("x",), "two")
    index.clear("train", ["a"])
    assert freed == []
    publish(index, ["b"], ("y",), "three")
    assert freed == ["one"]
    index.clear("train", ["b"])
    assert sorted(freed) == ["one", "three", "two"]
    assert index.stats() == {"rows": 0, "bytes": 0, "blocks": 0, "partitions": {},
                             "nodes": {"here": {"bytes": 0, "budget": 1 << 30, "waiting": 0}}}  # fmt: skip


def test_slots_are_used_again_without_old_cells() -> None:
    index, _ = make()
    publish(index, ["a", "b"], ("x",), "one")
    index.clear("train", ["a"])
    index.tag("train", ["c"], [{"n": 1}])
    with pytest.raises(QueueError, match=r"'x'.*missing on rows 'c'"):
        index.locate("train", ["b", "c"], ["x"])


def test_columns_of_one_put_share_their_cells_in_an_answer() -> None:
    index, _ = make()
    publish(index, ["a", "b", "c"], ("x", "y"), "one")
    publish(index, ["c", "a"], ("z",), "two")
    found = index.locate("train", ["c", "a"], ["x", "z", "y"])
    assert [names for names, _, _ in found.groups] == [["x", "y"], ["z"]]
    assert [locator.block for _, locator in found.blocks] == ["one", "two"]
    assert found.groups[0][2].tolist() == [2, 0]
    assert found.groups[1][2].tolist() == [0, 1]


def test_a_copy_that_replaces_a_block_loses_no_change_made_meanwhile() -> None:
    index, freed = make()
    publish(index, list("abcdef"), ("x", "y"), "big", COMPACT_ABOVE_BYTES)
    (sparse,) = index.clear("train", list("abc"))
    answer = index.compaction.survivors(sparse)
    assert answer is not None
    _, columns, rows = answer
    assert rows.tolist() == [3, 4, 5]
    index.clear("train", ["d"])
    publish(index, ["e"], ("x",), "newer")
    assert index.compaction.replace(sparse, rows, columns, Locator("here", "small", 50))
    assert freed == ["big"]
    found = index.locate("train", ["e", "f"], ["x", "y"])
    where = [(locator.block, row) for (_, block, rows) in found.groups for locator, row in
             zip([found.blocks[b][1] for b in block], rows.tolist(), strict=True)]  # fmt: skip
    assert where == [("newer", 0), ("small", 2), ("small", 1), ("small", 2)]
    assert not index.compaction.replace(sparse, rows, columns, Locator("here", "late", 50))
    assert index.stats()["bytes"] == 150


def test_puts_over_budget_are_granted_in_turn() -> None:
    index, _ = make(limit=100)
    publish(index, ["a"], ("x",), "one", 80)
    large = index.publish("train", ["b"], None, ("x",), Locator("here", "two", 90))
    small = index.publish("train", ["c"], None, ("x",), Locator("here", "three", 10))
    assert not large.future.done()
    assert not small.future.done()  # or a large put might wait forever
    index.clear("train", ["a"])
    assert large.future.done()
    assert small.future.done()


def test_a_put_that_gave_up_lets_the_next_one_pass() -> None:
    index, _ = make(limit=100)
    publish(index, ["a"], ("x",), "one", 80)
    with pytest.raises(DeadlineExceeded, match=r"80 of 100 bytes of node here.*80 bytes: 1 rows of 'train' × x"):
        publish(index, ["b"], ("x",), "two", 90)
    publish(index, ["c"], ("x",), "three", 10)
    assert index.list("train", None, None)[0] == ["a", "c"]


def reserved(index: Index, size: int, ticket: str) -> Pending[None]:
    return index.room("here", size, ticket)


def test_reserved_room_is_kept_for_its_ticket() -> None:
    index, _ = make(limit=100)
    second = reserved(index, 60, "a1") and reserved(index, 60, "b1")
    assert not second.future.done()
    assert index.stats()["bytes"] == 60
    answer = index.publish("train", ["a"], None, ("x",), Locator("here", "one", 60), "a1")
    assert answer.future.done()  # at once, before others that wait
    assert index.stats()["bytes"] == 60
    index.clear("train", ["a"])
    assert second.future.done()
    index.release("b")
    index.release("b")
    assert index.stats()["bytes"] == 0
    late = index.publish("train", ["b"], None, ("x",), Locator("here", "two", 60), "b1")
    assert late.future.done()  # a released ticket counts as none
    assert index.stats()["bytes"] == 60


def test_room_reserved_by_dead_processes_is_given_to_others() -> None:
    index, _ = make(limit=100)
    _, second, third = reserved(index, 60, "a"), reserved(index, 60, "b"), reserved(index, 1, "c")
    assert "60 bytes: puts under way" in second.explain()
    assert "1 other puts are before it" in third.explain()
    index.expire(older_than_s=60)
    assert not second.future.done()
    index.expire(older_than_s=-1)
    assert second.future.done()


def test_room_granted_to_a_cancelled_call_is_given_back() -> None:
    async def work() -> None:
        index, _ = make(limit=100)
        index.room("here", 100, "a")
        waiting = asyncio.ensure_future(index.room("here", 100, "b").within(20).resolve())
        await asyncio.sleep(0)
        index.release("a")  # grants the waiting call,
        waiting.cancel()  # which is cancelled before it sees the grant
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert index.stats()["bytes"] == 0

    asyncio.run(work())


def test_an_interrupted_grant_does_not_block_later_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    index, _ = make(limit=100)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index.publish("train", ["a"], None, ("x",), Locator("here", "one", 80))
    publish(index, ["b"], ("x",), "two", 100)
    assert index.stats()["bytes"] == 100


def test_blocks_that_cannot_be_freed_are_not_counted_forever(caplog: pytest.LogCaptureFixture) -> None:
    def full(locators: list[Locator]) -> None:
        raise OSError(28, "No space left on device")

    index = Index(100, full)
    publish(index, ["a"], ("x",), "one", 40)
    publish(index, ["a"], ("x",), "two", 60)
    index.clear("train", ["a"])
    assert index.stats()["bytes"] == 0
    assert "could not be freed" in caplog.text


def test_a_cursor_of_a_put_misses_nothing_that_came_with_its_memory() -> None:
    index, _ = make(limit=100)
    publish(index, ["a"], ("x",), "one", 50)
    index.room("here", 50, "mine")
    index.publish("train", ["b"], None, ("x",), Locator("here", "three", 50))
    answer = index.publish("train", ["a"], None, ("x",), Locator("here", "two", 50), "mine")
    assert index.list("train", None, answer.future.result(0)["version"])[0] == ["b"]


def test_any_number_of_puts_may_wait_for_the_budget() -> None:
    index, freed = make(limit=100)
    publish(index, ["a"], ("x",), "one", 100)
    count = 3000
    rooms = [reserved(index, 1, f"r{i}-") for i in range(count)]
    puts = [index.publish("train", ["b"], None, ("x",), Locator("here", f"b{i}", 50)) for i in range(count)]
    index.clear("train", ["a"])
    assert sum(room.future.done() for room in rooms) == 100
    for room in rooms:
        room.drop()
    index.release("r")
    assert all(put.future.done() for put in puts)  # each takes the place of the one before
    assert len(freed) == count
    assert index.stats()["bytes"] == 50


def test_an_append_whose_rows_are_gone_when_there_is_room_is_refused_and_costs_nothing() -> None:
    index, _ = make(limit=100)
    publish(index, ["a"], ("x",), "one", 80)
    append = index.publish("train", ["a"], None, ("y",), Locator("here", "two", 50), None, True)
    after = index.publish("train", ["b"], None, ("x",), Locator("here", "three", 100))
    index.clear("train", ["a"])
    with pytest.raises(QueueError, match="'a'"):
        append.future.result(0)
    assert after.future.done()
    assert index.stats()["bytes"] == 100
    index.clear("train", ["b"])
    reserved(index, 40, "mine")
    with pytest.raises(QueueError, match="'b'"):
        index.publish("train", ["b"], None, ("y",), Locator("here", "four", 40), "mine", True)
    assert index.stats()["bytes"] == 0


def test_tags_that_do_not_fit_the_rows_change_nothing() -> None:
    index, _ = make()
    with pytest.raises(QueueError, match="2 rows were given 1 tags"):
        publish(index, ["a", "b"], ("x",), "one", tags=[{}])
    assert index.stats()["rows"] == 0
    assert index.stats()["bytes"] == 0


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_a_wait_looks_only_at_rows_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    index, _ = make()
    keys, looks = [f"k{i}" for i in range(1000)], []
    waiting = index.wait("train", keys, {"status": "done"}, 1000)
    tags_of = index._partitions.waiters._tags_of

    def counted(partition: str, key: str) -> Any:
        looks.append(key)
        return tags_of(partition, key)

    monkeypatch.setattr(index._partitions.waiters, "_tags_of", counted)
    for key in keys:
        index.tag("train", [key, f"other_{key}"], [{"status": "done"}] * 2)
    assert looks == keys
    assert waiting.future.result(0)[0] == keys


def test_a_row_that_changed_back_or_was_cleared_is_waited_for_again() -> None:
    index, _ = make()
    waiting = index.wait("train", ["b", "a"], {"status": ["done"]}, 2)
    index.tag("train", ["a"], [{"status": "done"}])
    index.tag("train", ["a"], [{"status": "running"}])
    index.tag("train", ["b"], [{"status": "done"}])
    index.clear("train", ["b"])
    index.tag("train", ["a"], [{"status": "done"}])
    assert not waiting.future.done()
    assert "b (no such row yet)" in waiting.explain()
    index.tag("train", ["b"], [{"status": "done"}])
    keys, tags, _, _ = waiting.future.result(0)
    assert keys == ["b", "a"]
    tags[0]["status"] = "mine"
    assert index.list("train", {"status": "done"}, None)[0] == ["a", "b"]
    assert not waiting.drop()


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_blocks_of_a_snapshot_stay_until_it_is_done() -> None:
    index, freed = make()
    publish(index, ["a"], ("x",), "one")
    first, second = index.snapshots.dump(), index.snapshots.dump()
    index.clear("train", ["a"])
    publish(index, ["a"], ("x",), "two")
    index.clear("train", ["a"])
    assert freed == ["two"]
    assert [locator.block for locator in index.known()] == ["one"]
    assert "100 bytes: a snapshot under way" in index._blocks.holders("here")
    index.snapshots.unpin(first["pin"])
    assert freed == ["two"]
    index.snapshots.unpin(second["pin"])
    assert freed == ["two", "one"]
    assert index.stats()["bytes"] == 0


def test_a_put_that_waits_during_a_restore_comes_after_it() -> None:
    index, freed = make(limit=100)
    publish(index, ["a"], ("x",), "one", 60)
    dumped = index.snapshots.dump()
    index.snapshots.unpin(dumped["pin"])
    waiting = index.publish("train", ["b"], None, ("x",), Locator("here", "two", 50))
    (number,) = dumped["blocks"]
    index.snapshots.load(dumped["tables"], {number: Locator("here", "copy", 40)})
    assert freed == ["one"]
    assert waiting.future.done()
    assert index.list("train", None, None)[0] == ["a", "b"]
    assert index.stats()["bytes"] == 90
    index.clear("train", ["a", "b"])
    assert index.stats()["bytes"] == 0


def test_blocks_of_a_restore_that_never_ended_are_expected_no_more() -> None:
    index, _ = make()
    index.snapshots.expect(Locator("here", "one", 100))
    index.expire(older_than_s=60)
    assert [locator.block for locator in index.known()] == ["one"]
    index.expire(older_than_s=-1)
    assert index.known() == []


def test_a_damaged_dump_changes_nothing() -> None:
    index, freed = make()
    publish(index, ["a"], ("x",), "one")
    dumped = index.snapshots.dump()
    with pytest.raises(CheckpointError, match="damaged"):
        index.snapshots.load(dumped["tables"], {77: Locator("here", "copy", 100)})
    assert freed == []
    assert len(index.locate("train", ["a"], ["x"]).blocks) == 1


def test_a_block_is_compacted_only_if_the_copy_is_much_smaller() -> None:
    index, _ = make()
    keys = [f"k{i}" for i in range(10)]
    publish(index, keys, ("x", "y"), "big", COMPACT_ABOVE_BYTES)
    for i in range(10):  # one column of every row is replaced: half the cells are dead, but no whole row or column
        publish(index, [keys[i]], ("x" if i % 2 else "y",), f"b{i}")
    assert index.clear("train", keys[:2]) == []
    assert index.clear("train", keys[2:5]) != []


# -- threads, size ---------------------------------------------------------------------------------------------------


def test_tags_of_many_threads_are_all_kept() -> None:
    index, _ = make()

    def write(name: str) -> None:
        for i in range(200):
            index.tag("train", ["row"], [{f"{name}{i}": i}])

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.list("train", None, None)[1][0]) == 800


def test_looking_up_many_rows_takes_no_python_per_column() -> None:
    index, _ = make()
    keys = [f"k{i}" for i in range(5000)]
    publish(index, keys, tuple(f"c{i}" for i in range(32)), "one")
    found = index.locate("train", keys[::-1], [f"c{i}" for i in range(32)])
    assert len(found.groups) == 1
    assert np.array_equal(found.groups[0][2], np.arange(5000)[::-1])
