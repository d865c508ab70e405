"""Policy and value losses per response token, in the flat layout (see `layout`); `aggregate` makes them one number.

Each function masks its inputs before it computes, so that masked tokens influence neither value nor gradient. Ratios
of single tokens come from log-ratios clamped to ±20, so that none overflows.

`POLICY_LOSSES` is the table behind `algorithm.loss`. verl's kl_cov and clip_cov are left out: they choose among the
tokens of a micro-batch, so their loss would depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tqppo.algorithms.layout import apply_mask, masked_sum, per_token, row_mean

_MAX_LOG_RATIO = 20.0
_MAX_MEAN_LOG_RATIO = 10.0  # GSPO's bound on the mean over a sequence


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
    """Options of the policy losses, named like the settings of the config's `algorithm` section."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0  # 0: off
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    dro_beta: float = 0.1


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`losses` [N] with gradient, and sums over the tokens that count: divide them by the mini-batch's tokens."""

    losses: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyTokens, PolicyOptions], TokenLoss]


def ppo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), with a negative A at most −A·dual (PPO, clip-higher, dual clip)."""
    log_ratio, advantages = _log_ratio(tokens), _advantages(tokens)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * _clip(ratio, options)
    losses, is_lower = torch.maximum(plain, clipped), None
    if options.clip_dual > 0:
        bound = advantages.abs() * options.clip_dual  # with A ≥ 0 the loss is negative: never bounded
        losses, is_lower = torch.minimum(losses, bound), losses > bound
    return TokenLoss(_weighted(losses, tokens), _sums(log_ratio, clipped > plain, is_lower))


def gspo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """PPO's clip on the sequence's ratio exp(mean log-ratio); each token carries its share of the gradient (GSPO).

    Only the mean is bounded: clamping single tokens first would move the mean of sequences with extreme ones.
    """
    log_ratio, advantages = apply_mask(tokens.mask, tokens.logprobs - tokens.old_logprobs), _advantages(tokens)
    mean = row_mean(log_ratio.detach(), tokens.mask, tokens.lengths)  # [B]
    # The value of the mean, with the gradient of the token's own log-probability.
    shared = per_token(mean, tokens.lengths) + log_ratio - log_ratio.detach()
    ratio = shared.clamp(max=_MAX_MEAN_LOG_RATIO).exp()
    plain, clipped = -advantages * ratio, -advantages * _clip(ratio, options)
    losses = torch.maximum(plain, clipped)
    return TokenLoss(_weighted(losses, tokens), _sums(log_ratio, clipped > plain))


def cispo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−sg(clip(ρ))·A·log π: clipped tokens keep a gradient (CISPO)."""
    log_ratio = _log_ratio(tokens).detach()
    ratio = log_ratio.exp()
    clipped = _clip(ratio, options)
    losses = -clipped * _advantages(tokens) * apply_mask(tokens.mask, tokens.logprobs)
    return TokenLoss(_weighted(losses, tokens), _sums(log_ratio, ratio != clipped))


def gpg(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·log π: the plain policy gradient (GPG)."""
    losses = -_advantages(tokens) * apply_mask(tokens.mask, tokens.logprobs)
    return TokenLoss(_weighted(losses, tokens), _sums(_log_ratio(tokens)))


def geo_mean(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·(geometric mean of the sequence's clipped ratios), the same value on each token of the sequence (GMPO).

    clip_low and clip_high bound the log-ratio; A is the sequence's mean advantage. Meant for seq-mean-token-mean.
    """
    lengths = tokens.lengths
    log_ratio, advantages = _log_ratio(tokens), _advantages(tokens)
    # The pessimistic one of log-ratio and clipped log-ratio: only the side that A pushes to is bounded.
    sign = advantages.sign()
    bound = 0.5 * (options.clip_high + options.clip_low) + 0.5 * (options.clip_high - options.clip_low) * sign
    pessimistic = sign * torch.minimum(sign * log_ratio, bound)
    ratio = row_mean(pessimistic, tokens.mask, lengths).exp()  # [B]
    sequence = -row_mean(advantages, tokens.mask, lengths) * ratio
    if tokens.weights is not None:
        log_weights = apply_mask(tokens.mask, (tokens.weights + 1e-10).log())
        sequence = sequence * row_mean(log_weights, tokens.mask, lengths).exp()
    outside = (log_ratio > options.clip_high) | (log_ratio < -options.clip_low)
    sums = _sums(log_ratio, outside & (advantages > 0), outside & (advantages < 0))
    return TokenLoss(apply_mask(tokens.mask, per_token(sequence, lengths)), sums)


def sapo(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·σ(τ(ρ − 1))·4/τ, τ by the sign of A: a soft gate instead of a clip (SAPO)."""
    log_ratio, advantages = _log_ratio(tokens), _advantages(tokens)
    tau = torch.where(advantages > 0, options.sapo_tau_positive, options.sapo_tau_negative).to(advantages.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    return TokenLoss(_weighted(-advantages * gate * 4.0 / tau, tokens), _sums(log_ratio))


def dppo(tokens: PolicyTokens, options: PolicyOptions, *, divergence: Literal["tv", "kl"]) -> TokenLoss:
    """−A·sg(min(ρ, dual))·log π on tokens whose probability has not moved too far the way A pushes it (DPPO).

    "tv" measures the difference of the sampled token's probabilities, "kl" the KL divergence between (this token, all
    others) under the old and the new policy. clip_low and clip_high bound it.
    """
    logprobs, old = apply_mask(tokens.mask, tokens.logprobs), apply_mask(tokens.mask, tokens.old_logprobs)
    advantages, log_ratio = _advantages(tokens), _log_ratio(tokens).detach()
    new_p, old_p = logprobs.detach().exp(), old.exp()
    if divergence == "tv":
        moved = (new_p - old_p).abs()
    else:
        others = ((1.0 - old_p + 1e-8) / (1.0 - new_p + 1e-8)).log()
        moved = old_p * (old - logprobs.detach()) + (1.0 - old_p) * others
    too_high = (moved > options.clip_high) & (new_p > old_p)
    too_low = (moved > options.clip_low) & (new_p < old_p)
    keep = ~torch.where(advantages > 0, too_high, too_low)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(max=options.clip_dual) if options.clip_dual > 0 else ratio
    losses = apply_mask(keep, -advantages * bounded * logprobs)
    return TokenLoss(_weighted(losses, tokens), _sums(log_ratio, ~keep & tokens.mask, (ratio > bounded) & keep))


def dro(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−(A·log π − β/2·(log π − log π_old)²): the policy gradient with a quadratic pull to the old policy (DRO)."""
    distance = apply_mask(tokens.mask, tokens.logprobs - tokens.old_logprobs)
    gradient = _advantages(tokens) * apply_mask(tokens.mask, tokens.logprobs)
    losses = 0.5 * options.dro_beta * distance.square() - gradient
    return TokenLoss(_weighted(losses, tokens), _sums(_log_ratio(tokens)))


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "dppo_tv": partial(dppo, divergence="tv"),
    "dppo_kl": partial(dppo, divergence="kl"),
    "dro": dro,
}
# Losses whose gradient is not 0 on tokens with advantage 0; the actor skips the forward of such rows for the others.
LEARNS_WITHOUT_ADVANTAGE = frozenset({"dro"})


def _log_ratio(tokens: PolicyTokens) -> Tensor:
    """log π − log π_old within ±20, 0 where the mask is false: [N]."""
    log_ratio = apply_mask(tokens.mask, tokens.logprobs - tokens.old_logprobs)
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _advantages(tokens: PolicyTokens) -> Tensor:
    return apply_mask(tokens.mask, tokens.advantages)


def _clip(ratio: Tensor, options: PolicyOptions) -> Tensor:
    return ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)


def _weighted(losses: Tensor, tokens: PolicyTokens) -> Tensor:
    return losses if tokens.weights is None else losses * apply_mask(tokens.mask, tokens.weights)


def _sums(log_ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> dict[str, Tensor]:
    zero = log_ratio.new_zeros(())
    return {
        "actor/pg_clipfrac": zero if clipped is None else torch.count_nonzero(clipped),
        "actor/pg_clipfrac_lower": zero if lower is None else torch.count_nonzero(lower),
        "actor/ppo_kl": -log_ratio.detach().sum(),
    }


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> TokenLoss:
    """½·max((v − R)², (clip(v, v_old ± clip) − R)²) per token, all [N]; a `clip` of 0 turns clipping off."""
    losses = apply_mask(mask, values - returns).square()
    num_clipped = losses.new_zeros(())
    if clip > 0:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        clipped = apply_mask(mask, near - returns).square()
        num_clipped = torch.count_nonzero(clipped > losses)
        losses = torch.maximum(losses, clipped)
    sums = {"critic/vf_clipfrac": num_clipped, "critic/vpred_mean": masked_sum(values.detach(), mask)}
    return TokenLoss(0.5 * losses, sums)
