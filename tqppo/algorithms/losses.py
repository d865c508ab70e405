"""Policy and value losses per response token, in the flat layout (see `layout`); `aggregate` makes them one number.

Every function blanks what lies under the mask before it computes, so masked tokens influence neither value nor
gradient. Log-ratios are clamped to ±20, so that no ratio overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tqppo.algorithms.layout import blank, per_token, row_counts, row_sum

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The response tokens of some rows: [N] each, `lengths` [B]."""

    logprobs: Tensor  # of the policy that learns, with gradient
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    lengths: Tensor  # int64
    weights: Tensor | None = None  # rollout correction, multiplied into the losses


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What the config calls algorithm.clip_low, clip_high, clip_dual, sapo_tau_positive, sapo_tau_negative."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0  # 0: off
    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`losses` [N] with gradient, and sums over the tokens that count: divide them by the mini-batch's tokens."""

    losses: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


def summed(log_ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> dict[str, Tensor]:
    zero = log_ratio.new_zeros(())
    return {
        "actor/pg_clipfrac": zero if clipped is None else torch.count_nonzero(clipped),
        "actor/pg_clipfrac_lower": zero if lower is None else torch.count_nonzero(lower),
        "actor/ppo_kl": -log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(),
    }


def weighted(losses: Tensor, tokens: PolicyTokens) -> Tensor:
    return losses if tokens.weights is None else losses * blank(tokens.mask, tokens.weights)


def ppo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), with a negative A at most −A·dual (PPO, clip-higher, dual clip)."""
    log_ratio, advantages = blank(tokens.mask, tokens.logprobs - tokens.old_logprobs, tokens.advantages)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    pull = -advantages
    plain = pull * ratio
    clipped = pull * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    losses = torch.maximum(plain, clipped)
    is_clipped = clipped.detach() > plain.detach()
    is_lower = None
    if options.clip_dual > 0:
        bound = advantages.abs() * options.clip_dual  # with A ≥ 0 the loss is negative: never bounded
        is_lower = losses.detach() > bound
        losses = torch.minimum(losses, bound)
    return TokenLoss(weighted(losses, tokens), summed(log_ratio, is_clipped, is_lower))


def gspo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """PPO's clip on the sequence's ratio exp(mean log-ratio); each token carries its share of the gradient (GSPO)."""
    logprobs, old, advantages = blank(tokens.mask, tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    log_ratio = logprobs.detach() - old
    counts = row_counts(tokens.mask, tokens.lengths, log_ratio.dtype).clamp(min=1)
    sequence = row_sum(log_ratio, tokens.lengths) / counts  # [B]
    # Worth the sequence's ratio, with the gradient of the token's own log-probability.
    ratio = (logprobs - logprobs.detach() + per_token(sequence, tokens.lengths)).clamp(max=10.0).exp()
    pull = -advantages
    plain = pull * ratio
    clipped = pull * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    is_clipped = clipped.detach() > plain.detach()
    return TokenLoss(weighted(torch.maximum(plain, clipped), tokens), summed(log_ratio, is_clipped))


def cispo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−sg(clip(ρ))·A·log π: clipped tokens keep a gradient (CISPO)."""
    logprobs, old, advantages = blank(tokens.mask, tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    log_ratio = logprobs.detach() - old
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return TokenLoss(weighted(-(clipped * advantages) * logprobs, tokens), summed(log_ratio, ratio != clipped))


def gpg(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·log π: the plain policy gradient (GPG)."""
    logprobs, old, advantages = blank(tokens.mask, tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    return TokenLoss(weighted(-advantages * logprobs, tokens), summed(logprobs.detach() - old))


def geo_mean(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·(geometric mean of the sequence's clipped ratios), the same value on each token of the sequence (GMPO).

    clip_low and clip_high bound the log-ratio; A is the sequence's mean advantage. Meant for seq-mean-token-mean.
    """
    lengths = tokens.lengths
    log_ratio, advantages = blank(tokens.mask, tokens.logprobs - tokens.old_logprobs, tokens.advantages)
    counts = row_counts(tokens.mask, lengths, log_ratio.dtype).clamp(min=1)
    # The pessimistic one of log-ratio and clipped log-ratio: only the side that A pushes to is bounded.
    sign = advantages.sign()
    bound = 0.5 * (options.clip_high + options.clip_low) + 0.5 * (options.clip_high - options.clip_low) * sign
    pushed = sign * log_ratio
    pessimistic = sign * torch.minimum(pushed, bound)
    mean = (row_sum(pessimistic, lengths) / counts).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sequence = -row_sum(advantages, lengths) / counts * mean.exp()  # [B]
    if tokens.weights is not None:
        log_weights = blank(tokens.mask, (tokens.weights + 1e-10).log())
        sequence = sequence * (row_sum(log_weights, lengths) / counts).exp()
    outside = (log_ratio.detach() > options.clip_high) | (log_ratio.detach() < -options.clip_low)
    metrics = summed(log_ratio, outside & (advantages > 0), outside & (advantages < 0))
    return TokenLoss(blank(tokens.mask, per_token(sequence, lengths)), metrics)


def sapo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·σ(τ(ρ − 1))·4/τ, τ by the sign of A: a soft gate instead of a clip (SAPO)."""
    log_ratio, advantages = blank(tokens.mask, tokens.logprobs - tokens.old_logprobs, tokens.advantages)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_positive = advantages.sign().clamp(min=0.0)  # 1 or 0; torch.where is slow on a CPU
    tau = options.tau_negative + (options.tau_positive - options.tau_negative) * is_positive
    losses = torch.sigmoid(tau * (ratio - 1.0)) * (advantages / tau * -4.0)
    return TokenLoss(weighted(losses, tokens), summed(log_ratio))


POLICY_LOSSES: dict[str, Callable[[PolicyTokens, PolicyOptions], TokenLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "sapo": sapo,
}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> TokenLoss:
    """½·max((v − R)², (clip(v, v_old ± clip) − R)²) per token, all [N]; a `clip` of 0 turns clipping off."""
    values, old_values, returns = blank(mask, values, old_values, returns)
    plain = (values - returns).square()
    if clip <= 0:
        sums = {"critic/vf_clipfrac": values.new_zeros(()), "critic/vpred_mean": values.detach().sum()}
        return TokenLoss(0.5 * plain, sums)
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    clipped = (near - returns).square()
    is_clipped = clipped.detach() > plain.detach()
    sums = {"critic/vf_clipfrac": is_clipped.sum(), "critic/vpred_mean": values.detach().sum()}
    return TokenLoss(0.5 * torch.maximum(plain, clipped), sums)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each token's distribution: [N, V] → [N]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
