"""Policy losses from the literature that no preset uses: DPPO, DRO, KL-cov, clip-cov. For your own trainers.

The two covariance losses choose among the tokens they are given: they depend on the cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tqppo.algorithms.layout import blank, masked_mean
from tqppo.algorithms.losses import MAX_LOG_RATIO, PolicyOptions, PolicyTokens, TokenLoss, summed, weighted


def dppo(tokens: PolicyTokens, options: PolicyOptions, *, divergence: str) -> TokenLoss:
    """−A·sg(min(ρ, dual))·log π on tokens whose probability has not moved too far the way A pushes (DPPO).

    `divergence` is "tv" (difference of probabilities) or "kl" (between the sampled token and all others);
    clip_low and clip_high bound it.
    """
    logprobs, old = blank(tokens.mask, tokens.logprobs, tokens.old_logprobs)
    advantages = blank(tokens.mask, tokens.advantages)
    log_ratio = (logprobs - old).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    p, q = logprobs.detach().exp(), old.exp()
    if divergence == "tv":
        too_high, too_low = p - q > options.clip_high, q - p > options.clip_low
    else:
        moved = q * (old - logprobs.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        too_high, too_low = (moved > options.clip_high) & (p > q), (moved > options.clip_low) & (p < q)
    keep = ~torch.where(advantages > 0, too_high, too_low)
    losses = -advantages * ratio.clamp(max=options.clip_dual) * logprobs * keep
    return TokenLoss(
        weighted(losses, tokens), summed(log_ratio, ~keep & tokens.mask, (ratio > options.clip_dual) & keep)
    )


def dro(tokens: PolicyTokens, *, beta: float) -> TokenLoss:
    """−(A·log π − β/2·(log π − log π_old)²) (DRO)."""
    logprobs, log_ratio = blank(tokens.mask, tokens.logprobs, tokens.logprobs - tokens.old_logprobs)
    losses = 0.5 * beta * log_ratio.square() - blank(tokens.mask, tokens.advantages) * logprobs
    return TokenLoss(weighted(losses, tokens), summed(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)))


def _covariance(tokens: PolicyTokens) -> Tensor:
    """(A − mean A)·(log π − mean log π) per token; −∞ where the mask is false."""
    logprobs, advantages = tokens.logprobs.detach(), tokens.advantages
    product = (advantages - masked_mean(advantages, tokens.mask)) * (logprobs - masked_mean(logprobs, tokens.mask))
    return torch.where(tokens.mask, product, -torch.inf)


def kl_cov(tokens: PolicyTokens, *, share: float, coef: float) -> TokenLoss:
    """−Aρ, plus coef·|log ρ| on the `share` of tokens whose advantage and log-probability vary most together."""
    log_ratio = blank(tokens.mask, tokens.logprobs - tokens.old_logprobs)
    losses = -blank(tokens.mask, tokens.advantages) * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    count = min(max(1, int(int(tokens.mask.sum()) * share)), losses.numel())
    chosen = torch.zeros_like(tokens.mask)
    chosen[_covariance(tokens).topk(count).indices] = True
    losses = losses + coef * blank(chosen & tokens.mask, log_ratio.abs())
    return TokenLoss(weighted(losses, tokens), {"actor/ppo_kl": log_ratio.detach().abs().sum()})


def clip_cov(
    tokens: PolicyTokens,
    options: PolicyOptions,
    *,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator | None = None,
) -> TokenLoss:
    """PPO's clipped loss without a random `share` of the tokens whose covariance lies between `low` and `high`."""
    log_ratio = blank(tokens.mask, tokens.logprobs - tokens.old_logprobs)
    advantages = blank(tokens.mask, tokens.advantages)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    covariance = _covariance(tokens)
    eligible = (covariance > low) & (covariance < high) & (clipped.detach() <= plain.detach())
    candidates = eligible.nonzero().flatten()
    count = max(int(share * int(tokens.mask.sum())), 1)
    order = torch.randperm(candidates.numel(), generator=generator, device="cpu").to(candidates.device)
    keep = torch.ones_like(tokens.mask)
    keep[candidates[order[:count]]] = False
    return TokenLoss(
        weighted(torch.maximum(plain, clipped) * keep, tokens),
        summed(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), ~keep),
    )
