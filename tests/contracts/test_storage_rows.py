"""What the storage contract compares with: rows, and values of the model machine."""

from __future__ import annotations

import pytest
import torch

from tqppo.contracts.storage_model import COLUMNS, plain, put_form, value
from tqppo.contracts.storage_rows import check_ragged, keys, numbers


def nested(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def test_ragged_rows_are_equal_only_with_the_same_layout_dtype_and_values() -> None:
    rows = [torch.arange(3), torch.arange(1)]
    check_ragged(nested(3, 1), rows, "int64")
    for found, dtype in ((nested(3, 2), "int64"), (nested(3), "int64"), (nested(3, 1), "int32"), (rows[0], "int64")):
        with pytest.raises(AssertionError):
            check_ragged(found, rows, dtype)


def test_numbers_depend_on_their_seed_alone() -> None:
    assert torch.equal(numbers(4, dtype="int8", seed=3), numbers(4, dtype="int8", seed=3))
    assert numbers(2, 3, dtype="bfloat16").dtype is torch.bfloat16
    assert keys(2) == ["row0_0_0", "row1_0_0"]


@pytest.mark.parametrize("column", COLUMNS)
def test_values_of_the_model_come_back_plain_from_the_form_that_is_put(column: str) -> None:
    values = [value(column, seed) for seed in range(4)]
    given = put_form(column, values)
    if column == "model_pairs":
        assert [row.tolist() for row in given] == values
    else:
        assert given == values
    assert plain(values) == values
