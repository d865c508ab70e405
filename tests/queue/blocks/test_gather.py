"""Rows read from blocks, compared with the simplest implementation; buffers that are reused, but never too early."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tqppo.columns import Column, Kind, declare
from tqppo.errors import QueueError
from tqppo.queue.blocks.arena import SMALL_BYTES, Arena
from tqppo.queue.blocks.block import ALIGN, Block, BlockView, parse
from tqppo.queue.blocks.encode import encode
from tqppo.queue.blocks.gather import Runs, excerpt, gather
from tqppo.queue.meta import Jagged

declare(Column("gather_text", Kind.RAGGED, "int32"))
declare(Column("gather_wide", Kind.RAGGED, "bfloat16", trailing=(3,)))
declare(Column("gather_turned", Kind.RAGGED, "int64", ragged_dim=1))
declare(Column("gather_row", Kind.ROW, "float64", trailing=(2,)))
declare(Column("gather_any", Kind.RAGGED, "any", trailing=(None,)))


def view(block: Block, *, writable: bool) -> BlockView:
    return BlockView(block.layout, whole=block.flat(), writable=writable)


def made(lengths: list[int], seed: int) -> tuple[Block, dict[str, list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 99, shape, generator=generator)

    rows = {
        "gather_text": [numbers(n).int() for n in lengths],
        "gather_wide": [numbers(n, 3).bfloat16() for n in lengths],
        "gather_turned": [numbers(4, n) for n in lengths],
        "gather_row": [numbers(2).double() for _ in lengths],
    }
    return encode(rows, [f"{seed}_{i}" for i in range(len(lengths))]), rows


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.sampled_from([0, 1, 2, 7, 300]), min_size=1, max_size=6), min_size=1, max_size=3),
    writable=st.booleans(),
    data=st.data(),
)
def test_any_choice_of_rows_comes_out_in_its_order(
    lengths: list[list[int]], writable: bool, data: st.DataObject
) -> None:
    blocks = [made(each, seed) for seed, each in enumerate(lengths)]
    cells = [(b, r) for b, each in enumerate(lengths) for r in range(len(each))]
    chosen = data.draw(st.lists(st.sampled_from(cells), min_size=1, max_size=12))
    runs = Runs.of(np.array([b for b, _ in chosen]), np.array([r for _, r in chosen]))
    views = [view(block, writable=writable) for block, _ in blocks]
    for name in ("gather_text", "gather_wide", "gather_turned", "gather_row"):
        found = gather(views, runs, name, Arena())
        assert isinstance(found, torch.Tensor)
        assert found.layout is (torch.strided if name == "gather_row" else torch.jagged)
        for row, (b, r) in zip(found.unbind(), chosen, strict=True):
            assert torch.equal(row, blocks[b][1][name][r])


def test_neighbouring_rows_are_a_view_where_memory_is_ours() -> None:
    block, _ = made([5, 9, 2], 0)
    ours, theirs = view(block, writable=True), view(block, writable=False)
    runs = Runs.of(np.zeros(2, int), np.array([1, 2]))
    inside = ours.values("gather_text").ctypes.data
    for source, is_view in ((ours, True), (theirs, False)):
        found = gather([source], runs, "gather_text", Arena())
        assert isinstance(found, torch.Tensor)
        assert (found.values().data_ptr() == inside + 5 * 4) is is_view


def test_columns_with_rows_of_equal_lengths_can_be_added() -> None:
    block, rows = made([5, 0, 2], 0)
    runs, shapes = Runs.of(np.zeros(3, int), np.array([2, 0, 1])), {}
    text = gather([view(block, writable=True)], runs, "gather_text", Arena(), shapes)
    other = gather([view(block, writable=True)], runs, "gather_text", Arena(), shapes)
    assert isinstance(text, torch.Tensor)
    total = text + other
    assert total.layout is torch.jagged
    assert torch.equal(total.unbind()[0], 2 * rows["gather_text"][2])
    assert (text._get_min_seqlen(), text._get_max_seqlen()) == (0, 5)  # type: ignore[attr-defined]


def test_rows_of_different_shapes_are_an_error() -> None:
    first = encode({"gather_any": [torch.zeros(2, 3)]}, ["a"])
    second = encode({"gather_any": [torch.zeros(2, 4)]}, ["b"])
    runs = Runs.of(np.array([0, 1]), np.array([0, 0]))
    with pytest.raises(QueueError, match=r"gather_any.*\(3,\).*\(4,\)"):
        gather([view(first, writable=True), view(second, writable=True)], runs, "gather_any", Arena())


def test_an_excerpt_is_a_block_of_its_own() -> None:
    block, rows = made([3, 0, 300, 8], 1)
    smaller = excerpt(view(block, writable=False), ["gather_wide", "gather_row"], np.array([0, 3]))
    assert set(smaller.layout.fields) == {"gather_wide", "gather_row"}
    assert smaller.layout.block != block.layout.block
    runs = Runs.of(np.zeros(2, int), np.array([0, 1]))
    found = gather([view(smaller, writable=True)], runs, "gather_wide", Arena())
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found.unbind()[1], rows["gather_wide"][3])


def test_a_block_is_aligned_and_describes_itself() -> None:
    block, _ = made([5, 1], 0)
    assert all(start % ALIGN == 0 for start, _ in block.pieces)
    assert parse(block.flat()) == block.layout
    assert Block.of(block.flat()).renamed().layout.fields == block.layout.fields
    with pytest.raises(QueueError, match="do not start with the header of a block"):
        parse(b"\0" * 100)
    with pytest.raises(QueueError, match="too few"):
        parse(b"TQ")


def test_contiguous_input_is_not_copied() -> None:
    values = torch.arange(100, dtype=torch.int32)
    block = encode({"gather_text": Jagged(values, [40, 60])}, ["a", "b"])
    assert block.pieces[-1][1].ctypes.data == values.data_ptr()


def test_memory_is_used_again_only_after_the_last_tensor_is_gone() -> None:
    arena = Arena()
    lent = arena.lend(4 * SMALL_BYTES)
    where = lent.ctypes.data
    part = torch.frombuffer(lent, dtype=torch.int32)[10:20].view(2, 5)
    del lent
    assert arena.lend(4 * SMALL_BYTES).ctypes.data != where
    del part
    gc.collect()
    spares = [arena.lend(4 * SMALL_BYTES) for _ in range(2)]
    assert where in [each.ctypes.data for each in spares]


def test_spare_memory_is_bounded() -> None:
    arena = Arena(keep_bytes=4 * SMALL_BYTES)
    lent = [arena.lend(2 * SMALL_BYTES) for _ in range(5)]
    del lent
    gc.collect()
    assert 0 < arena.spare_bytes() <= 4 * SMALL_BYTES
