"""Did you mean: the known names nearest to a misspelt one."""

from __future__ import annotations

import pytest

from tqppo.config.read.nearest import did_you_mean, distance, nearest


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("lr", "lr", 0), ("lr", "rl", 1), ("epoch", "epochs", 1), ("abc", "", 3)]
)
def test_distance_counts_edits(a: str, b: str, edits: int) -> None:
    assert distance(a, b) == edits


def test_nearest_ignores_case_and_dashes() -> None:
    assert nearest("Mini-Batch-Size", ["mini_batch_size", "epochs"]) == ["mini_batch_size"]
    assert nearest("zzz", ["lr", "epochs"]) == []


def test_a_longer_name_that_begins_alike_is_near() -> None:
    assert nearest("sorting", ["add", "sort"]) == ["sort"]
    assert did_you_mean("sorting", ["add", "sort"]) == 'did you mean "sort"?'
    assert did_you_mean("zzz", ["add"]) == ""
