"""What a learner hands to its loss: columns of the tokens that count, and the totals of each term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tqppo.algorithms.aggregate import Normalisers
from tqppo.algorithms.layout import to_nested
from tqppo.workers.actor import Actor
from tqppo.workers.compute import learner
from tqppo.workers.compute.learner import Selection
from tqppo.workers.compute.microbatch import FlatRows, MicroBatchCut


def test_columns_of_every_layout_meet_at_the_token(make_actor: Callable[..., Actor], make_rows: Any) -> None:
    """The teacher's row of position t is about token t + 1; here it holds that token."""
    rows = make_rows([3, 1, 4], [2, 5, 1])
    tokens = rows["tokens"]
    ahead = torch.cat([torch.cat([row[1:], row.new_full((1,), -1)]) for row in tokens.unbind()])
    rows["teacher_ids"] = to_nested(ahead[:, None].expand(-1, 2), tokens.offsets().diff())
    rows["teacher_index"] = torch.tensor([4, 5, 6])
    actor, flat = make_actor(), FlatRows.of(rows)
    micro = actor.build(flat, MicroBatchCut.apart(torch.tensor([2, 1])), flat.response["response_mask"])
    found = actor.tokens(flat, micro)
    assert found.sequence_column("teacher_ids").tolist() == [[token, token] for token in micro.targets.tolist()]
    assert found.row_column("teacher_index").tolist() == [6] * int(found.lengths[0]) + [5] * int(found.lengths[1])
    assert torch.equal(found.column("advantages"), flat.response["advantages"][micro.places])
    assert torch.equal(flat.response_tokens(), torch.cat([tokens.unbind()[i][-n:] for i, n in enumerate((2, 5, 1))]))


def test_each_term_has_totals_of_its_own() -> None:
    counts = (torch.tensor([3, 2, 0]), torch.tensor([1, 0, 0]))
    selection = Selection(torch.ones(5).bool(), counts, torch.tensor([True, False, False]), torch.tensor([0.5, 1, 1]))
    *totals, trained = learner._measures(selection, torch.tensor([0, 1, 2]))
    assert Normalisers(*totals[:3]) == Normalisers(5, 2, 1.5)
    assert Normalisers(*totals[3:]) == Normalisers(1, 1, 0.5)
    assert trained == 3
