"""Blocks and pins: when memory is freed, and which blocks a sweep must leave alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from tqppo.queue.index.blocks import Blocks, Record
from tqppo.queue.index.budget import Budget
from tqppo.queue.index.pins import Pins
from tqppo.queue.storage import Locator


def made(freed: list[str]) -> Blocks:
    def free(locators: Sequence[Locator]) -> None:
        freed.extend(locator.block for locator in locators)

    return Blocks(Budget(1000, threading.RLock()), free)


def record(name: str, rows: int = 2) -> Record:
    return Record(Locator("here", name, 100), "train", np.arange(rows), ("x",), rows)


def test_a_block_is_freed_with_its_last_cell() -> None:
    freed: list[str] = []
    blocks = made(freed)
    number = blocks.add(record("one"))
    blocks.release_cells({number: 1})
    assert freed == []
    blocks.release_cells({number: 1})
    assert freed == ["one"]
    assert blocks.holders("here") == "no rows"


def test_a_pinned_block_is_freed_after_its_last_pin() -> None:
    pins, dead = Pins(), {1: Locator("here", "one", 100), 2: Locator("here", "two", 100)}
    first, second = pins.add([1]), pins.add([1])
    assert pins.unpinned(dead) == [dead[2]]
    assert pins.unpinned(pins.remove(first)) == []
    assert list(pins.lingering()) == [dead[1]]
    assert pins.unpinned(pins.remove(second)) == [dead[1]]


def test_all_blocks_are_replaced_by_those_of_a_snapshot() -> None:
    freed: list[str] = []
    blocks = made(freed)
    blocks.add(record("old"))
    restored = Record(Locator("here", "new", 100), "train", np.full(0, -1, np.int64), (), 0)
    restored.add_column("x", np.array([4, 5]), np.array([0, 2]))
    assert (restored.slots.tolist(), restored.columns, restored.live) == ([4, -1, 5], ("x",), 2)
    blocks.expect(restored.locator)
    assert [locator.block for locator in blocks.known()] == ["old", "new"]
    blocks.replace_all(dict(zip(blocks.new_numbers(1), [restored], strict=True)))
    assert freed == ["old"]
    assert [locator.block for locator in blocks.known()] == ["new"]
