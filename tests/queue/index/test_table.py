"""One partition of the index: slots, cells and tags."""

from __future__ import annotations

import numpy as np
import pytest

from tqppo.errors import QueueError
from tqppo.queue.index.table import Table, matches


def filled(*keys: str) -> tuple[Table, np.ndarray]:
    table = Table()
    slots, known = table.add(keys)
    assert not known.any()
    return table, slots


def test_new_keys_take_the_slots_of_removed_ones() -> None:
    table, slots = filled("a", "b", "c")
    table.remove(["b"], slots[[1]])
    again, known = table.add(["d", "a"])
    assert again.tolist() == [1, 0]
    assert known.tolist() == [False, True]


def test_placing_cells_counts_what_it_replaces_by_block() -> None:
    table, slots = filled("a", "b", "c")
    assert table.place(slots, ["x", "y"], 1, np.arange(3)) == {}
    assert table.place(slots[:2], ["x"], 2, np.arange(2)) == {1: 2}
    assert table.holds("x", slots, 1).tolist() == [False, False, True]
    assert table.remove(["a", "c"], slots[[0, 2]]) == {1: 3, 2: 1}


def test_a_row_without_a_column_is_named() -> None:
    table, slots = filled("a", "b")
    table.place(slots[:1], ["x"], 1, np.arange(1))
    with pytest.raises(QueueError, match=r"'x'.*missing on rows 'b' \(1 of 2\)"):
        table.check_columns("train", ["a", "b"], slots, ["x"])
    with pytest.raises(QueueError, match="no columns 'z'; it has: x"):
        table.check_columns("train", ["a"], slots[:1], ["z"])
    assert table.common_columns(slots) == ()
    assert table.common_columns(slots[:1]) == ("x",)


def test_tags_given_out_are_copies() -> None:
    table, slots = filled("a")
    table.merge(slots, [{"n": 1}])
    table.tags_at(slots)[0]["n"] = 2
    assert table.tags_of("a") == {"n": 1}


@pytest.mark.parametrize(
    ("where", "expected"),
    [({}, True), ({"n": 1}, True), ({"n": [0, 1]}, True), ({"m": None}, True), ({"n": None}, False), ({"n": 2}, False)],
)
def test_a_tag_matches_if_equal_one_of_several_or_absent(where: dict[str, object], expected: bool) -> None:
    assert matches({"n": 1}, where) is expected
