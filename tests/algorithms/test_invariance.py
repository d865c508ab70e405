"""The loss and its gradient do not depend on how the batch is cut, padded or ordered: random batches, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tqppo.algorithms import distillation, kl
from tqppo.algorithms.advantages import to_tokens
from tqppo.algorithms.aggregate import MODES, Normalisers, aggregate, normalisers, session_weights
from tqppo.algorithms.groups import GROUP_ESTIMATORS, RowGroups, estimate_groups
from tqppo.algorithms.layout import row_counts
from tqppo.algorithms.losses import POLICY_LOSSES, PolicyOptions, PolicyTokens, value_loss

OPTIONS = PolicyOptions(0.2, 0.28, 3.0)
LOSSES = (*POLICY_LOSSES, "value", "kl", "distill", "distill_pg")


@dataclass(frozen=True)
class Batch:
    """Random response columns [N], in float64."""

    columns: dict[str, Tensor]
    mask: Tensor
    lengths: Tensor
    session: Tensor  # [B]

    def take(self, rows: list[int]) -> Batch:
        starts = self.lengths.cumsum(0) - self.lengths
        where = torch.cat(
            [torch.arange(int(starts[i]), int(starts[i] + self.lengths[i])) for i in rows] or [torch.zeros(0).long()]
        )
        columns = {name: values[where] for name, values in self.columns.items()}
        return Batch(columns, self.mask[where], self.lengths[rows], self.session[rows])


@st.composite
def batches(draw) -> Batch:
    lengths = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=2, max_size=8)))
    count = int(lengths.sum())
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    names = ("logprobs", "old", "advantages", "weights", "returns")
    columns = {name: torch.randn(count, generator=random, dtype=torch.float64) for name in names}
    columns["weights"] = columns["weights"].abs()
    mask = torch.rand(count, generator=random) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    session = torch.randint(0, len(lengths), (len(lengths),), generator=random)
    return Batch(columns, mask, lengths, session)


def token_losses(name: str, batch: Batch, leaf: Tensor) -> Tensor:
    c, mask = batch.columns, batch.mask
    tokens = PolicyTokens(leaf, c["old"], c["advantages"], mask, batch.lengths, c["weights"])
    if name == "value":
        return value_loss(leaf, c["old"], c["returns"], mask, clip=0.5).losses
    if name == "kl":
        return kl.estimate("k3+", leaf, c["old"], mask)
    if name == "distill":
        return distillation.divergence("k3", leaf, c["old"], mask, loss_max=2.0)
    if name == "distill_pg":
        teacher = distillation.divergence("k1", leaf, c["returns"], mask)
        return distillation.as_policy_gradient(teacher, tokens, OPTIONS).losses
    return POLICY_LOSSES[name](tokens, OPTIONS).losses


def loss_and_grad(name: str, mode: str, batch: Batch, whole: Normalisers, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = batch.columns["logprobs"].clone().requires_grad_()
    losses = token_losses(name, batch, leaf)
    total = aggregate(losses, batch.mask, batch.lengths, mode, whole, horizon=6.0, session_weights=weights)
    (grad,) = torch.autograd.grad(total, leaf)
    return total.detach(), grad


def normalised(batch: Batch) -> tuple[Normalisers, Tensor]:
    weights = session_weights(batch.session, row_counts(batch.mask, batch.lengths) > 0).double()
    return normalisers(batch.mask, batch.lengths, weights), weights


def check_parts(batch: Batch, mode: str, parts: list[list[int]]) -> None:
    """The sum over `parts` (row numbers, each row once) is the whole, for every loss."""
    whole, weights = normalised(batch)
    order = [i for part in parts for i in part]
    pieces = [batch.take(part) for part in parts]
    counted = [normalisers(piece.mask, piece.lengths, weights[part]) for piece, part in zip(pieces, parts, strict=True)]
    torch.testing.assert_close(sum(each.sessions for each in counted), whole.sessions)
    for name in LOSSES:
        loss, grad = loss_and_grad(name, mode, batch, whole, weights)
        found = [loss_and_grad(name, mode, p, whole, weights[part]) for p, part in zip(pieces, parts, strict=True)]
        torch.testing.assert_close(sum(each[0] for each in found), loss)
        reordered = Batch({"logprobs": grad}, batch.mask, batch.lengths, batch.session).take(order)
        torch.testing.assert_close(torch.cat([each[1] for each in found]), reordered.columns["logprobs"])


@settings(deadline=None, max_examples=20)
@given(batches(), st.sampled_from(MODES), st.randoms())
def test_loss_and_gradient_do_not_depend_on_order_micro_batches_or_ranks(batch, mode, random):
    order = list(range(len(batch.lengths)))
    random.shuffle(order)
    cut = random.randint(1, len(order))
    check_parts(batch, mode, [order[:cut], order[cut:]])
    check_parts(batch, mode, [[i] for i in order])


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from(MODES), st.integers(1, 3))
def test_loss_and_gradient_do_not_depend_on_padding_rows(batch, mode, count):
    whole, weights = normalised(batch)
    junk = {name: torch.cat([values, torch.full((count,), torch.nan)]) for name, values in batch.columns.items()}
    padded = Batch(
        junk,
        torch.cat([batch.mask, torch.zeros(count, dtype=torch.bool)]),
        torch.cat([batch.lengths, torch.ones(count, dtype=torch.int64)]),
        torch.cat([batch.session, 1000 + torch.arange(count)]),
    )
    padded_whole, padded_weights = normalised(padded)
    assert padded_whole == whole
    for name in LOSSES:
        loss, grad = loss_and_grad(name, mode, batch, whole, weights)
        found, found_grad = loss_and_grad(name, mode, padded, padded_whole, padded_weights)
        torch.testing.assert_close(found, loss, rtol=0, atol=1e-14)
        torch.testing.assert_close(found_grad[: len(grad)], grad, rtol=0, atol=1e-14)
        assert (found_grad[len(grad) :] == 0).all()


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from(MODES))
def test_what_lies_under_the_mask_influences_neither_loss_nor_gradient(batch, mode):
    whole, weights = normalised(batch)
    poisoned = {name: torch.where(batch.mask, values, torch.nan) for name, values in batch.columns.items()}
    for name in LOSSES:
        loss, grad = loss_and_grad(name, mode, batch, whole, weights)
        other = Batch(poisoned, batch.mask, batch.lengths, batch.session)
        found, found_grad = loss_and_grad(name, mode, other, whole, weights)
        torch.testing.assert_close((found, found_grad), (loss, grad), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_an_all_padding_mini_batch_has_loss_0_and_gradient_0(mode):
    mask, lengths = torch.zeros(3, dtype=torch.bool), torch.tensor([1, 2])
    losses = torch.full((3,), torch.nan, requires_grad=True)
    found = aggregate(losses, mask, lengths, mode, normalisers(mask, lengths))
    found.backward()
    assert found == 0
    assert losses.grad.tolist() == [0.0, 0.0, 0.0]


def test_aggregation_worked_by_hand():
    losses, lengths = torch.tensor([1.0, 2.0, 3.0, 100.0, 6.0]), torch.tensor([1, 3, 1])
    mask = torch.tensor([True, True, True, False, True])
    weights = session_weights(torch.tensor([7, 7, 9]), torch.ones(3, dtype=torch.bool))
    whole = normalisers(mask, lengths, weights)
    assert whole == Normalisers(tokens=4, sequences=3, sessions=2)
    expected = {
        "token-mean": 12 / 4,
        "token-sum": 12,
        "seq-mean-token-mean": (1 + 2.5 + 6) / 3,
        "seq-mean-token-sum": (1 + 5 + 6) / 3,
        "seq-mean-token-sum-norm": (1 + 5 + 6) / 3 / 10,
        "session-mean": (0.5 * 1 + 0.5 * 2.5 + 6) / 2,
    }
    for mode, value in expected.items():
        found = aggregate(losses, mask, lengths, mode, whole, horizon=10.0, session_weights=weights)
        assert float(found) == pytest.approx(value)


def test_an_unknown_aggregation_names_the_known_ones():
    with pytest.raises(AssertionError, match="known: token-mean"):
        aggregate(torch.zeros(1), torch.ones(1).bool(), torch.ones(1).long(), "mean", Normalisers())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12), st.randoms())
def test_group_advantages_do_not_depend_on_the_order_of_rows(members, random):
    order = list(range(len(members)))
    random.shuffle(order)
    group = torch.tensor([g for g, _ in members])
    reward = torch.tensor([r for _, r in members], dtype=torch.float64)
    yes = torch.ones(len(members), dtype=torch.bool)
    rows = RowGroups(group, torch.arange(len(members)), yes, ~yes, torch.ones(len(members)).long())
    shuffled = RowGroups(group[order], torch.tensor(order), yes, ~yes, rows.lengths)
    for estimator in GROUP_ESTIMATORS.values():
        found = estimate_groups(estimator, reward[order], shuffled).scalars
        torch.testing.assert_close(found, estimate_groups(estimator, reward, rows).scalars[order])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(-5, 5)), min_size=1, max_size=8))
def test_more_trajectories_in_a_session_change_no_advantage(sessions):
    """(group, rows, reward) per session: as many rows as it may have, its scalar is that of a single row."""
    group = torch.tensor([g for g, _, _ in sessions])
    reward = torch.tensor([r for _, _, r in sessions], dtype=torch.float64)
    counts = torch.tensor([n for _, n, _ in sessions])
    yes = torch.ones(len(sessions), dtype=torch.bool)
    plain = RowGroups(group, torch.arange(len(sessions)), yes, ~yes, torch.ones(len(sessions)).long())
    which = torch.repeat_interleave(counts)
    is_final = torch.zeros(len(which), dtype=torch.bool)
    is_final[counts.cumsum(0) - 1] = True
    many = RowGroups(group[which], which, is_final, torch.zeros_like(is_final), torch.ones(len(which)).long())
    rewards = torch.where(is_final, reward[which], 99.0)
    for name in ("grpo", "dr_grpo", "grpo_passk", "rloo", "gpg"):
        expected = estimate_groups(GROUP_ESTIMATORS[name], reward, plain).scalars
        found = estimate_groups(GROUP_ESTIMATORS[name], rewards, many).scalars
        torch.testing.assert_close(found, expected[which])
        assert to_tokens(found, torch.ones(len(which)).bool(), many.lengths).shape == (len(which),)
