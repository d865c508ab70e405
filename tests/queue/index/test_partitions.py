"""Partitions: tables by name, versions, and what waiting calls see."""

from __future__ import annotations

import pytest

from tqppo.errors import QueueError
from tqppo.queue.index.partitions import Partitions
from tqppo.queue.index.table import Table
from tqppo.queue.index.waiters import Waiter


def tagged(partitions: Partitions, name: str, *keys: str) -> None:
    slots, _ = partitions.add(name).add(keys)
    partitions.mark_changed(name, keys, slots)


def test_an_unknown_partition_is_an_error_that_names_the_known_ones() -> None:
    partitions = Partitions()
    tagged(partitions, "val", "a")
    with pytest.raises(QueueError, match=r"'train' \(partitions: val\); asked for 'b'"):
        partitions.existing("train", ["b"])
    assert partitions.find("train", {}, -1) == ([], [], (), 1)


def test_a_partition_without_rows_is_gone() -> None:
    partitions = Partitions()
    tagged(partitions, "train", "a", "b")
    partitions.remove_rows("train", ["a", "b"])
    assert partitions.tables == {}


def test_only_rows_changed_after_a_version_are_found() -> None:
    partitions = Partitions()
    tagged(partitions, "train", "a")
    before = partitions.version
    tagged(partitions, "train", "b")
    assert partitions.find("train", {}, before)[0] == ["b"]


def test_a_restored_table_answers_waiting_calls() -> None:
    partitions, table = Partitions(), Table()
    waiter = Waiter("train", ["a"], {}, 1)
    partitions.waiters.add(waiter)
    table.add(["a"])
    partitions.replace_all({"train": table})
    assert waiter.future.result(0)[0] == ["a"]
