from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqppo.algorithms.balance import micro_batches, partition, workload
from tqppo.errors import DataError

LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 5))
def test_a_partition_has_each_row_once_and_equal_counts(lengths, parts):
    lengths = lengths + [1] * (-len(lengths) % parts)
    found = partition([workload(n) for n in lengths], parts)
    assert sorted(i for part in found for i in part) == list(range(len(lengths)))
    assert {len(part) for part in found} == {len(lengths) // parts}
    assert found == partition([workload(n) for n in lengths], parts)


def test_a_partition_gives_each_row_to_the_rank_with_the_least_work():
    assert partition([8, 7, 6, 5, 4, 2], 2) == [[0, 3, 4], [1, 2, 5]]  # 17 and 15
    assert partition([9, 1, 1, 1], 2, equal_count=False) == [[0], [1, 2, 3]]


def test_a_count_that_does_not_divide_is_an_error_with_the_numbers():
    with pytest.raises(DataError, match="7 rows do not divide over 2 ranks"):
        partition([1.0] * 7, 2)


@given(LENGTHS, st.integers(1000, 3000))
def test_micro_batches_have_each_row_once_and_fit_the_budget(lengths, budget):
    found = micro_batches(lengths, budget)
    assert all(found)
    assert sorted(i for rows in found for i in rows) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in rows) for rows in found) <= budget
    assert len(found) <= 2 * -(-sum(lengths) // budget)  # at most one micro-batch is half empty


def test_a_row_over_the_budget_is_an_error_that_says_what_to_set():
    with pytest.raises(DataError, match="1 of 2 rows are longer than micro_batch_tokens = 10; the longest has 12"):
        micro_batches([5, 12], 10)
