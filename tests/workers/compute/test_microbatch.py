from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tqppo.workers.compute.microbatch import FlatRows, MicroBatchCut, build, last_positions, plan


@pytest.mark.parametrize("budget", [1, 40, 300, 10_000])
def test_plan_uses_each_row_once_within_the_budget(budget: int) -> None:
    widths = [random.Random(budget + i).randint(1, 90) for i in range(60)]
    cuts = plan(widths, budget, overhead=8)
    assert sorted(row for cut in cuts for row in cut) == list(range(60))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(widths[i] for i in cut) <= budget


def test_plan_pads_little_when_forwards_are_cheap_and_cuts_little_when_they_are_expensive() -> None:
    widths = [10] * 20 + [100] * 20
    assert len(plan(widths, 10_000, overhead=1)) == 2
    assert len(plan(widths, 10_000, overhead=100_000)) == 1
    assert plan([], 100) == []


def test_outputs_are_the_positions_before_the_response_tokens(rows: dict[str, Any]) -> None:
    flat = FlatRows.of(rows)
    chosen = torch.tensor([3, 0])  # prompts of 5 and 3 tokens, responses of 12 and 4
    micro = build(flat, MicroBatchCut.apart(chosen))
    tokens = [row.tolist() for row in rows["tokens"].unbind()]
    assert micro.input_ids.shape == (2, 16)
    assert micro.input_ids[0].tolist() == tokens[3][:-1]
    assert micro.input_ids[1, :6].tolist() == tokens[0][:-1]
    assert micro.targets.tolist() == tokens[3][5:] + tokens[0][3:]
    assert micro.outputs.tolist() == [*range(4, 16), *range(16 + 2, 16 + 6)]
    assert micro.row.tolist() == [0] * 12 + [1] * 4
    assert flat.response["advantages"][micro.places].tolist() == [
        *rows["advantages"].unbind()[3].tolist(),
        *rows["advantages"].unbind()[0].tolist(),
    ]


def test_packed_rows_restart_their_positions(rows: dict[str, Any]) -> None:
    flat, chosen = FlatRows.of(rows), torch.tensor([0, 2])  # 7 and 8 tokens
    packed, trimmed = (
        build(flat, MicroBatchCut.apart(chosen), layout="packed"),
        build(flat, MicroBatchCut.apart(chosen)),
    )
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[*range(6), *range(7)]]
    assert packed.targets.tolist() == trimmed.targets.tolist()
    assert packed.input_ids[0, packed.outputs].tolist() == trimmed.input_ids.flatten()[trimmed.outputs].tolist()


def test_tokens_that_do_not_count_are_left_out(rows: dict[str, Any]) -> None:
    flat = FlatRows.of(rows)
    keep = flat.response["response_mask"]
    micro = build(flat, MicroBatchCut.apart(torch.arange(len(flat))), keep=keep)
    assert micro.places.tolist() == keep.nonzero().flatten().tolist()
    assert torch.bincount(micro.row, minlength=len(flat)).tolist() == flat.count(keep).tolist()


@pytest.mark.parametrize("layout", ["trimmed", "packed"])
def test_last_positions_are_the_last_tokens(rows: dict[str, Any], layout: str) -> None:
    micro = last_positions(FlatRows.of(rows), torch.tensor([1, 4, 2]), layout=layout)
    tokens = rows["tokens"].unbind()
    assert micro.input_ids.flatten()[micro.outputs].tolist() == [int(tokens[i][-1]) for i in (1, 4, 2)]


def test_a_row_without_a_prompt_is_refused(make_rows: Any) -> None:
    with pytest.raises(AssertionError, match="at least one prompt token"):
        FlatRows.of(make_rows([0], [3]))
