"""Log-probability and entropy of tokens from hidden states, holding [tokens × vocabulary] once, and in chunks.

The head runs on as many tokens at a time as fit `CHUNK_ELEMENTS` logits; with gradients, further
chunks are recomputed in the backward pass instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**26  # 256 MB of float32 logits

Head = Callable[[Tensor], Tensor]


class _TokenLogprobs(torch.autograd.Function):
    """logits [N, V], targets [N] → log p(target) [N], entropy [N]; saves the logits and one number per token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        normaliser = logits.logsumexp(-1)  # [N]
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        entropy = None
        if with_entropy:
            weighted = (logits - normaliser[:, None]).exp_().mul_(logits)
            entropy = normaliser - weighted.sum(-1)
        ctx.save_for_backward(logits, targets, normaliser, entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing more
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, targets, normaliser, entropy = ctx.saved_tensors
        by_logprob, by_entropy = grads
        if by_logprob is None:
            by_logprob = torch.zeros_like(normaliser)
        scaled = (logits - normaliser[:, None]).exp_()  # p, then the gradient, in one buffer
        if by_entropy is not None and entropy is not None:
            surprise = logits - (normaliser - entropy)[:, None]  # log p + H
            scaled.mul_(surprise.mul_(by_entropy[:, None]).add_(by_logprob[:, None]).neg_())
        else:
            scaled.mul_(by_logprob.neg()[:, None])
        scaled.scatter_add_(-1, targets[:, None], by_logprob[:, None])
        return scaled, None, None


def _scored(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    return _TokenLogprobs.apply(logits, targets, with_entropy)


def token_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, *, vocabulary: int, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """hidden [N, H], targets [N] → log-probabilities [N] and, if asked, entropies [N], both float32."""
    chunk = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(targets) <= chunk:
        return _scored(head, hidden, targets, temperature, with_entropy)
    logprobs, entropies = [], []
    for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled():
            scored = checkpoint(_scored, head, part, wanted, temperature, with_entropy, use_reentrant=False)
        else:
            scored = _scored(head, part, wanted, temperature, with_entropy)
        logprobs.append(scored[0])
        entropies.append(scored[1])
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None
