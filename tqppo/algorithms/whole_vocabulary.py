"""The exact divergence between student and teacher over the whole vocabulary, for one chunk of tokens.

The student's and the teacher's logits are the only inputs; `chunks` keeps them from existing for all tokens at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tqppo.algorithms.top_k import lowest

KINDS = ("forward_kl", "reverse_kl")


def divergence(kind: str, logits: Tensor, teacher_logits: Tensor, *, logprob_min: float | None = None) -> Tensor:
    """KL(teacher ‖ student) or KL(student ‖ teacher) per token: two [n, V] → [n], with gradient to `logits`.

    `logprob_min` bounds all log-probabilities from below first. One [n, V] tensor is kept for the backward pass: the
    gradient itself. Models with more ids than the other, by padding of their embeddings, are compared on the ids that
    both have.
    """
    assert kind in KINDS, f"unknown divergence {kind!r}; known: {', '.join(KINDS)}"
    common = min(logits.shape[1], teacher_logits.shape[1])
    logits, teacher_logits = logits[:, :common], teacher_logits[:, :common].detach()
    losses: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        logits, teacher_logits, kind == "forward_kl", lowest(logprob_min)
    )
    return losses


class _Divergence(torch.autograd.Function):
    """Computes loss and gradient together: automatic differentiation would keep five [n, V] tensors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor, is_forward: bool, low: float) -> Tensor:
        log_q, log_p = logits.log_softmax(1), teacher_logits.log_softmax(1).clamp_(min=low)
        bounded_q = log_q.clamp(min=low)
        if is_forward:
            slope = log_p.exp()  # becomes d loss / d log q
            losses = (slope * log_p.sub_(bounded_q)).sum(1)
            slope.neg_()
        else:
            slope, excess = bounded_q.exp(), bounded_q - log_p
            losses = (slope * excess).sum(1)
            slope *= excess.add_(1.0)
        if ctx.needs_input_grad[0]:
            slope.masked_fill_(log_q < low, 0.0)
            total = slope.sum(1, keepdim=True)
            ctx.save_for_backward(slope.sub_(log_q.exp_().mul_(total)))
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0][:, None], None, None, None
