"""The index alone: no bytes, no processes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tqppo.errors import DeadlineExceeded, QueueError
from tqppo.protocols import Locator
from tqppo.queue.calls import run
from tqppo.queue.index import COMPACT_ABOVE_BYTES, Index


class Freed(list[str]):
    """Remembers what the index told the storage to free."""

    def __call__(self, locators: list[Locator]) -> None:
        self.extend(locator.block for locator in locators)


def make(limit: int = 1 << 30) -> tuple[Index, Freed]:
    freed = Freed()
    return Index(limit, freed), freed


def publish(
    index: Index, keys: list[str], columns: tuple[str, ...], block: str, size: int = 100, **more: object
) -> dict:
    async def work() -> dict:
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
    answer = index.survivors(sparse)
    assert answer is not None
    _, columns, rows = answer
    assert rows.tolist() == [3, 4, 5]
    index.clear("train", ["d"])
    publish(index, ["e"], ("x",), "newer")
    assert index.replace(sparse, rows, columns, Locator("here", "small", 50))
    assert freed == ["big"]
    found = index.locate("train", ["e", "f"], ["x", "y"])
    where = [(locator.block, row) for (_, block, rows) in found.groups for locator, row in
             zip([found.blocks[b][1] for b in block], rows.tolist(), strict=True)]  # fmt: skip
    assert where == [("newer", 0), ("small", 2), ("small", 1), ("small", 2)]
    assert not index.replace(sparse, rows, columns, Locator("here", "late", 50))
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
