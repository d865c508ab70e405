from __future__ import annotations

import pytest
import torch

from tqppo.algorithms import layout


def test_a_masked_token_has_neither_value_nor_gradient_whatever_it_was():
    values = torch.tensor([1.0, torch.nan, -torch.inf, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    found = layout.apply_mask(mask, values)
    (found * torch.tensor([3.0, torch.nan, torch.inf, 5.0])).nan_to_num().sum().backward()
    assert found.tolist() == [1.0, 0.0, 0.0, -2.0]
    assert values.grad.tolist() == [3.0, 0.0, 0.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masking_keeps_every_float_type(dtype):
    found = layout.apply_mask(torch.tensor([True, False]), torch.tensor([1.5, 2.5], dtype=dtype))
    assert found.dtype == dtype
    assert found.tolist() == [1.5, 0.0]


def test_rows_without_tokens_sum_to_0():
    lengths = torch.tensor([0, 2, 0, 1])
    assert layout.row_sum(torch.tensor([1.0, 2.0, 4.0]), lengths).tolist() == [0.0, 3.0, 0.0, 4.0]
    assert layout.row_sum(torch.zeros(0), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_the_response_positions_are_those_that_score_response_tokens():
    """Rows of 2 + 2 and 1 + 3 tokens; the output at t scores token t + 1."""
    found = layout.response_positions(torch.tensor([4, 4]), torch.tensor([2, 3]))
    assert found.tolist() == [1, 2, 4, 5, 6]


def test_an_empty_response_has_no_positions():
    found = layout.response_positions(torch.tensor([3, 3]), torch.tensor([0, 2]))
    assert found.tolist() == [3, 4]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [1], [5, 2], [0, 2]])
def test_ragged_columns_are_jagged_whatever_their_lengths(lengths):
    values, lengths = torch.arange(sum(lengths)), torch.tensor(lengths)
    nested = layout.to_nested(values, lengths)
    assert nested.layout == torch.jagged
    assert nested.values().tolist() == values.tolist()
    assert nested.offsets().diff().tolist() == lengths.tolist()


def test_whitening_one_token_leaves_it_alone_and_none_is_fine():
    assert layout.whiten(torch.tensor([3.0, 9.0]), torch.tensor([True, False])).tolist() == [3.0, 0.0]
    assert layout.whiten(torch.tensor([3.0]), torch.tensor([False])).tolist() == [0.0]
    assert layout.masked_mean(torch.tensor([torch.nan]), torch.tensor([False])) == 0
