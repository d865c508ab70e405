"""Aggregation of token losses to one number that does not depend on the cut into micro-batches, ranks and padding.

Each part is divided by the totals of the whole mini-batch, so that parts add up. Where data-parallel gradients are
averaged instead of summed, the caller multiplies by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tqppo.algorithms.layout import masked_sum, row_counts, row_mean

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "session-mean",
)


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Totals of a whole mini-batch without its padding. They are the sums of its parts' totals."""

    tokens: float = 0.0  # number of tokens that count
    sequences: float = 0.0  # number of rows with a token that counts
    sessions: float = 0.0  # Σ session weights of those rows


def normalisers(mask: Tensor, lengths: Tensor, session_weights: Tensor | None = None) -> Normalisers:
    """The totals of rows with `mask` [N], `lengths` [B] and `session_weights` [B] (default: one session per row)."""
    counts = row_counts(mask, lengths, torch.float64) > 0  # [B]
    weights = counts.double() if session_weights is None else session_weights.double() * counts
    return Normalisers(float(mask.sum()), float(counts.sum()), float(weights.sum()))


def session_weights(session: Tensor, counts: Tensor) -> Tensor:
    """1 / (rows of the session that count) for rows that count, 0 for others. `session` int64, `counts` bool, all [B].

    Call it on the whole batch: a session whose rows fall into two mini-batches then still has a total weight of 1.
    """
    _, which = torch.unique(session, return_inverse=True)
    rows = torch.bincount(which[counts], minlength=int(which.max()) + 1 if which.numel() else 0)
    return counts / rows[which].clamp(min=1)


def aggregate(
    losses: Tensor,
    mask: Tensor,
    lengths: Tensor,
    mode: str,
    whole: Normalisers,
    *,
    horizon: float = 1.0,
    session_weights: Tensor | None = None,
) -> Tensor:
    """The part that these token losses [N] contribute to the loss of the mini-batch described by `whole`.

    token-mean                Σ losses / tokens
    seq-mean-token-mean       Σ_rows mean of the row / sequences
    seq-mean-token-sum        Σ_rows sum of the row / sequences
    seq-mean-token-sum-norm   the same / `horizon`, a constant (Dr.GRPO)
    session-mean              Σ_rows weight · mean of the row / Σ weights; `session_weights` [B]
    """
    assert mode in MODES, f"unknown aggregation {mode!r}; known: {', '.join(MODES)}"
    if mode == "token-mean":
        return masked_sum(losses, mask) / _positive(whole.tokens)
    if mode == "token-sum":
        return masked_sum(losses, mask)
    if mode == "seq-mean-token-sum":
        return masked_sum(losses, mask) / _positive(whole.sequences)
    if mode == "seq-mean-token-sum-norm":
        return masked_sum(losses, mask) / (_positive(whole.sequences) * horizon)
    means = row_mean(losses, mask, lengths)  # [B]
    if mode == "seq-mean-token-mean":
        return means.sum() / _positive(whole.sequences)
    weights = means.new_ones(means.shape) if session_weights is None else session_weights.to(means.dtype)
    return (means * weights).sum() / _positive(whole.sessions)


def _positive(divisor: float) -> float:
    return divisor if divisor > 0 else 1.0  # an all-padding mini-batch gives exactly 0 and no gradient, not 0/0
