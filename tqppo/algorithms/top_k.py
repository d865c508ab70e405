"""Distillation losses over the teacher's k likeliest tokens, for one chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("forward_kl_topk", "reverse_kl_topk")
_LOWEST = -1e4  # of a log-probability: exp of it is 0, and 0 · −1e4 is 0 where 0 · −∞ is NaN


class Teacher(NamedTuple):
    """The teacher's k likeliest ids at each response token, and their log-probabilities: [N, K]."""

    ids: Tensor
    logprobs: Tensor


class TopK(NamedTuple):
    """Per token [N]: the losses with gradient, and statistics of the two top-k sets without."""

    losses: Tensor
    student_mass: Tensor  # the student's probability of the teacher's top k
    teacher_mass: Tensor  # the teacher's own probability of them
    overlap: Tensor  # number of tokens in both top-k sets
    overlap_advantage: Tensor  # mean of −p (log p − log q) over those


def compare(kind: str, logits: Tensor, teacher: Teacher, *, logprob_min: float | None = None) -> TopK:
    """A top-k loss of one chunk of tokens, see `chunks`, from the student's logits [n, V].

    Of [n, V] tensors only the logits are kept for the backward pass. `logprob_min` bounds all log-probabilities from
    below. Ids that the student does not have count as impossible.
    """
    assert kind in KINDS, f"unknown top-k loss {kind!r}; known: {', '.join(KINDS)}"
    logits = logits if logits.dtype == torch.float64 else logits.float()
    ids, log_p = teacher.ids.long(), teacher.logprobs.to(logits.dtype)
    is_known = ids < logits.shape[1]
    log_p = torch.where(is_known, log_p, _LOWEST).clamp(min=_LOWEST)
    own = logits.gather(1, ids * is_known)
    log_q = torch.where(is_known, own - logits.logsumexp(1, keepdim=True), _LOWEST)
    in_both = is_known & (own >= _least_of_top(logits, ids.shape[1]))
    loss = _forward_kl if kind == "forward_kl_topk" else _reverse_kl
    low = lowest(logprob_min)
    return TopK(loss(log_q, log_p, low), *_describe(in_both, log_q, log_p, low))


def lowest(logprob_min: float | None) -> float:
    """The lower bound of log-probabilities; without one, a value that stands for −∞."""
    return _LOWEST if logprob_min is None else logprob_min


def _forward_kl(log_q: Tensor, log_p: Tensor, low: float) -> Tensor:
    """Σ p (log p − log q) over the teacher's top k: [n, K] → [n]. Not renormalised, so it can be slightly negative."""
    log_q, log_p = log_q.clamp(min=low), log_p.clamp(min=low)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _reverse_kl(log_q: Tensor, log_p: Tensor, low: float) -> Tensor:
    """Σ q (log q − log p) over the teacher's top k and one bucket for all other tokens: [n, K] → [n], at least 0.

    Without the bucket the loss could be lowered by moving the student's mass out of the top k.
    """
    log_q, log_p = torch.cat([log_q, _log_rest(log_q)], 1), torch.cat([log_p, _log_rest(log_p)], 1)
    log_q, log_p = log_q.clamp(min=low), log_p.clamp(min=low)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def _log_rest(logprobs: Tensor) -> Tensor:
    """log(1 − Σ exp), the log-probability of all other tokens; at least log 1e-6, so that its gradient stays finite."""
    return (1.0 - logprobs.exp().sum(1, keepdim=True)).clamp(min=1e-6).log()


@torch.no_grad()
def _least_of_top(logits: Tensor, k: int) -> Tensor:
    """The student's k-th largest logit: [n, V] → [n, 1]."""
    return logits.topk(min(k, logits.shape[1]), dim=1).values[:, -1:]


@torch.no_grad()
def _describe(in_both: Tensor, log_q: Tensor, log_p: Tensor, low: float) -> list[Tensor]:
    """The figures of `TopK`; `in_both` [n, K] says which of the teacher's top k are the student's too."""
    count = in_both.sum(1)
    low_q, low_p = log_q.clamp(min=low), log_p.clamp(min=low)
    gained = -(low_p.exp() * (low_p - low_q) * in_both).sum(1) / count.clamp(min=1)
    return [log_q.exp().sum(1), log_p.exp().sum(1), count.float(), gained]
