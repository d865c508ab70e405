from __future__ import annotations

import pytest
import torch

from tqppo import columns
from tqppo.algorithms.padding import mini_batches, num_padding, padding_rows
from tqppo.columns import Column, Kind
from tqppo.errors import DataError, QueueError


@pytest.mark.parametrize(
    ("multiple", "rows", "expected"), [(120, 360, 0), (120, 371, 109), (120, 361, 119), (256, 1030, 250), (3, 7, 2)]
)
def test_padding_fills_up_to_the_next_multiple(multiple, rows, expected):
    assert num_padding(rows, multiple) == expected


def test_a_batch_without_rows_is_an_error_not_a_batch_of_padding():
    with pytest.raises(DataError, match="no trajectories"):
        num_padding(0, 8)


def test_padding_rows_come_from_the_declarations():
    columns.declare(Column("test_note", Kind.JSON, neutral=None))
    columns.declare(Column("test_experts", Kind.SEQUENCE, "int16", trailing=(None, None)))
    trailing = dict.fromkeys(("tokens", "response_mask", "rollout_logprobs", "reward", "test_note"), ())
    found = padding_rows(3, trailing | {"teacher_ids": (4,), "test_experts": (2, 8)}, step=7)
    assert found.keys == ["pad7_0_0", "pad7_1_0", "pad7_2_0"]
    assert all(
        tag["is_padding"] and (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (1, 1, 2)
        for tag in found.tags
    )
    assert "test_note" not in found.columns
    shapes = {name: [tuple(row.shape) for row in found.columns[name].unbind()] for name in found.columns}
    assert shapes["tokens"] == [(2,)] * 3
    assert shapes["response_mask"] == [(1,)] * 3
    assert shapes["teacher_ids"] == [(2, 4)] * 3
    assert shapes["test_experts"] == [(2, 2, 8)] * 3
    assert found.columns["response_mask"].dtype == torch.bool
    assert not found.columns["response_mask"].values().any()
    assert found.columns["reward"].tolist() == [0.0, 0.0, 0.0]
    assert found.columns["teacher_ids"].dtype == torch.int32


def test_padding_knows_columns_whose_second_dimension_is_ragged_and_columns_of_their_own_length():
    columns.declare(Column("mrope_ids", Kind.SEQUENCE, "int64", trailing=(4,), ragged_dim=1))
    columns.declare(Column("image_patches", Kind.RAGGED, "float32", trailing=(None,)))
    found = padding_rows(2, {"mrope_ids": (4,), "image_patches": (16,)}).columns
    assert [tuple(row.shape) for row in found["mrope_ids"].unbind()] == [(4, 2)] * 2
    assert [tuple(row.shape) for row in found["image_patches"].unbind()] == [(0, 16)] * 2


def test_an_undeclared_column_and_a_wrong_size_are_errors_that_name_the_column():
    with pytest.raises(QueueError, match="my_column"):
        padding_rows(1, {"my_column": ()})
    with pytest.raises(DataError, match=r"'tokens'.*found \(3,\)"):
        padding_rows(1, {"tokens": (3,)})


@pytest.mark.parametrize(
    ("real", "padding", "count"), [(361, 119, 4), (371, 109, 4), (400, 80, 4), (1030, 250, 5), (3, 5, 4), (8, 0, 2)]
)
def test_every_mini_batch_gets_its_share_of_real_rows_in_their_order(real, padding, count):
    is_padding = torch.arange(real + padding) >= real
    found = mini_batches(is_padding, count)
    assert torch.cat(found).sort().values.tolist() == list(range(real + padding))
    assert {part.numel() for part in found} == {(real + padding) // count}
    reals = [part[~is_padding[part]] for part in found]
    assert all(real // count <= part.numel() <= -(-real // count) for part in reals)
    assert torch.cat(reals).tolist() == list(range(real))


def test_the_cut_of_real_rows_does_not_depend_on_how_much_padding_there_is():
    def cut(padding: int) -> list[list[int]]:
        is_padding = torch.arange(10 + padding) >= 10
        return [part[~is_padding[part]].tolist() for part in mini_batches(is_padding, 2)]

    assert cut(0) == cut(2) == cut(6)
