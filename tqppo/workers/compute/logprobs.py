"""Log-probabilities and entropies of tokens from hidden states, in chunks of [tokens × vocabulary].

A chunk has at most `CHUNK_ELEMENTS` logits. With gradients, several chunks are recomputed in the backward pass instead
of being kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**26  # 256 MB of float32 logits

Head = Callable[[Tensor], Tensor]
TokenScores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, Σ p² over the vocabulary


def token_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float,
    with_entropy: bool = False,
    with_sum_squares: bool = False,
) -> TokenScores:
    """hidden [N, H], targets [N] → log-probabilities [N] and, if asked for, entropies [N] and Σ p² [N], in float32."""

    def score(part: Tensor, wanted: Tensor) -> TokenScores:
        logits = head(part).float()
        tempered = logits if temperature == 1.0 else logits / temperature
        return _scored(tempered, wanted, with_entropy, with_sum_squares)

    chunk = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(targets) <= chunk:
        return score(hidden, targets)
    pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    if torch.is_grad_enabled():
        scored = [checkpoint(score, part, wanted, use_reentrant=False) for part, wanted in pieces]
    else:
        scored = [score(part, wanted) for part, wanted in pieces]
    logprobs, entropy, sum_squares = zip(*scored, strict=True)
    return (
        torch.cat(logprobs),
        torch.cat(entropy) if with_entropy else None,
        torch.cat(sum_squares) if with_sum_squares else None,
    )


def _scored(logits: Tensor, targets: Tensor, with_entropy: bool, with_sum_squares: bool) -> TokenScores:
    """The scores of one chunk: logits [N, V], targets [N]."""
    normaliser = logits.logsumexp(-1)  # [N]
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    entropy = sum_squares = None
    if with_entropy:
        entropy = normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)
    if with_sum_squares:
        sum_squares = (2.0 * (logits - normaliser[:, None])).exp().sum(-1)
    return logprobs, entropy, sum_squares
