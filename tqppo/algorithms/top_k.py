"""Distillation losses over the teacher's k likeliest tokens, a chunk of tokens at a time. Flat layout, see `layout`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tqppo.algorithms.layout import apply_mask

KINDS = ("forward_kl_topk", "reverse_kl_topk")


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher's k likeliest ids at each response token, and their log-probabilities: [N, K]."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class TopK:
    """Per token [N]: the losses with gradient, and statistics of the two top-k sets without."""

    losses: Tensor
    student_mass: Tensor  # the student's probability of the teacher's top k
    teacher_mass: Tensor  # the teacher's own probability of them
    overlap: Tensor  # number of tokens in both top-k sets
    overlap_advantage: Tensor  # mean of −p (log p − log q) over those


def from_logits(
    kind: str,
    logits: Tensor,
    teacher: Teacher,
    mask: Tensor,
    *,
    logprob_min: float | None = None,
    chunk: int = 1024,
) -> TopK:
    """A top-k loss from the student's logits [N, V]. `logprob_min` bounds all log-probabilities from below.

    Besides `logits` and their gradient, only one [chunk, V] tensor exists at a time.
    """
    return _in_chunks(_one_chunk(kind, _keep, logprob_min), logits, teacher, mask, chunk)


def from_hidden(
    kind: str,
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    mask: Tensor,
    *,
    logprob_min: float | None = None,
    chunk: int = 1024,
) -> TopK:
    """The same from last hidden states [N, H] and the output embedding [V, H]: no [N, V] tensor ever exists.

    For a sampling temperature other than 1 the caller divides `hidden` by it.
    """

    def logits_of(part: Tensor) -> Tensor:
        return part @ head.T

    return _in_chunks(_one_chunk(kind, logits_of, logprob_min), hidden, teacher, mask, chunk)


def _keep(part: Tensor) -> Tensor:
    return part


_Chunk = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _one_chunk(kind: str, logits_of: Callable[[Tensor], Tensor], logprob_min: float | None) -> _Chunk:
    assert kind in KINDS, f"unknown top-k loss {kind!r}; known: {', '.join(KINDS)}"
    loss = _forward_kl if kind == "forward_kl_topk" else _reverse_kl

    def compute(source: Tensor, ids: Tensor, log_p: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        # Masked tokens are cut off from their source first, so that a NaN there reaches neither value nor gradient.
        logits = logits_of(torch.where(mask[:, None], source, 0.0))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_q = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
        return loss(log_q, log_p, logprob_min), *_describe(logits, ids, log_q, log_p, logprob_min)

    return compute


def _in_chunks(compute: _Chunk, source: Tensor, teacher: Teacher, mask: Tensor, chunk: int) -> TopK:
    logprobs = teacher.logprobs if teacher.logprobs.dtype == torch.float64 else teacher.logprobs.float()
    # The backward of torch.split is one concatenation; each slice would allocate a whole buffer.
    pieces = zip(
        torch.split(source, chunk),
        torch.split(teacher.ids.long(), chunk),
        torch.split(apply_mask(mask[:, None], logprobs), chunk),
        torch.split(mask, chunk),
        strict=True,
    )
    outputs = [checkpoint(compute, *piece, use_reentrant=False) for piece in pieces]
    return TopK(*(apply_mask(mask, torch.cat(column)) for column in zip(*outputs, strict=True)))


def _clamped(logprobs: Tensor, logprob_min: float | None) -> Tensor:
    return logprobs if logprob_min is None else logprobs.clamp(min=logprob_min)


def _forward_kl(log_q: Tensor, log_p: Tensor, logprob_min: float | None) -> Tensor:
    """Σ p (log p − log q) over the teacher's top k: [n, K] → [n]. Not renormalised, so it can be slightly negative."""
    log_q, log_p = _clamped(log_q, logprob_min), _clamped(log_p, logprob_min)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _reverse_kl(log_q: Tensor, log_p: Tensor, logprob_min: float | None) -> Tensor:
    """Σ q (log q − log p) over the teacher's top k and one bucket for all other tokens: [n, K] → [n], at least 0.

    Without the bucket the loss could be lowered by moving the student's mass out of the top k.
    """
    log_q, log_p = torch.cat([log_q, _log_rest(log_q)], 1), torch.cat([log_p, _log_rest(log_p)], 1)
    log_q, log_p = _clamped(log_q, logprob_min), _clamped(log_p, logprob_min)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def _log_rest(logprobs: Tensor) -> Tensor:
    """log(1 − Σ exp), the log-probability of all other tokens; at least log 1e-6, so that its gradient stays finite."""
    return (1.0 - logprobs.exp().sum(1, keepdim=True)).clamp(min=1e-6).log()


@torch.no_grad()
def _describe(logits: Tensor, ids: Tensor, log_q: Tensor, log_p: Tensor, logprob_min: float | None) -> list[Tensor]:
    ours = logits.topk(ids.shape[1], dim=1).indices
    both = (ids[:, :, None] == ours[:, None, :]).any(2)  # [n, K]
    count = both.sum(1)
    low_q, low_p = _clamped(log_q, logprob_min), _clamped(log_p, logprob_min)
    gained = -(low_p.exp() * (low_p - low_q) * both).sum(1) / count.clamp(min=1)
    return [log_q.exp().sum(1), log_p.exp().sum(1), count.float(), gained]
