"""Policy and value losses per response token, in the flat layout (see `layout`); `aggregate` makes them one number.

Every function blanks what lies under the mask before it computes, so masked tokens influence neither value nor
gradient. Log-ratios are clamped to ±20, so that no ratio overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

import torch
from torch import Tensor

from tqppo.algorithms.layout import blank, blank_, differentiable, masked_sum, per_token, row_counts, row_sum

MAX_LOG_RATIO = 20.0
_MAX_MEAN = 10.0  # of a sequence's log-ratio


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
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05


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
        "actor/ppo_kl": -log_ratio.detach().sum(),
    }


def weighted(losses: Tensor, tokens: PolicyTokens) -> Tensor:
    return losses if tokens.weights is None else losses * blank(tokens.mask, tokens.weights)


Terms = tuple[Tensor, Tensor, dict[str, Tensor]]  # losses [N], their derivative by the token's log-probability, sums
PolicyLoss = Callable[[PolicyTokens, PolicyOptions], TokenLoss]


def _by_hand(terms: Callable[[PolicyTokens, PolicyOptions], Terms]) -> PolicyLoss:
    """A loss from a function that works out values and derivatives; the tests check one against the other."""

    @wraps(terms)
    def loss(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
        with torch.no_grad():
            losses, slope, sums = terms(tokens, options)
            losses, slope = weighted(losses, tokens), weighted(slope, tokens)
        return TokenLoss(differentiable(tokens.logprobs, losses, slope), sums)

    return loss


def _log_ratio_and_pull(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """log π − log π_old within ±20, and −A: 0 where the mask is false."""
    log_ratio = blank_(tokens.mask, tokens.logprobs - tokens.old_logprobs).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio, blank_(tokens.mask, -tokens.advantages)


@_by_hand
def ppo(tokens: PolicyTokens, options: PolicyOptions) -> Terms:
    """max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), with a negative A at most −A·dual (PPO, clip-higher, dual clip)."""
    log_ratio, pull = _log_ratio_and_pull(tokens)
    ratio = log_ratio.exp()
    plain = pull * ratio
    clipped = ratio.clamp_(1.0 - options.clip_low, 1.0 + options.clip_high).mul_(pull)
    is_clipped = clipped > plain
    losses, moves = torch.maximum(plain, clipped, out=clipped), ~is_clipped
    is_lower = None
    if options.clip_dual > 0:
        bound = pull.abs_().mul_(options.clip_dual)  # with A ≥ 0 the loss is negative: never bounded
        is_lower = losses > bound
        losses, moves = torch.minimum(losses, bound, out=losses), moves.logical_and_(~is_lower)
    moves.logical_and_(log_ratio.abs() < MAX_LOG_RATIO)
    return losses, blank_(moves, plain), summed(log_ratio, is_clipped, is_lower)


@_by_hand
def gspo(tokens: PolicyTokens, options: PolicyOptions) -> Terms:
    """PPO's clip on the sequence's ratio exp(mean log-ratio); each token carries its share of the gradient (GSPO)."""
    log_ratio, pull = _log_ratio_and_pull(tokens)
    counts = row_counts(tokens.mask, tokens.lengths, log_ratio.dtype).clamp(min=1)
    mean = row_sum(log_ratio, tokens.lengths) / counts  # [B]
    ratio = mean.clamp(max=_MAX_MEAN).exp()
    plain = per_token(ratio, tokens.lengths).mul_(pull)
    clipped = per_token(ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high), tokens.lengths).mul_(pull)
    is_clipped = clipped > plain
    losses = torch.maximum(plain, clipped, out=clipped)
    moves = per_token(mean <= _MAX_MEAN, tokens.lengths).logical_and_(~is_clipped)
    return losses, blank_(moves, plain), summed(log_ratio, is_clipped)


@_by_hand
def cispo(tokens: PolicyTokens, options: PolicyOptions) -> Terms:
    """−sg(clip(ρ))·A·log π: clipped tokens keep a gradient (CISPO)."""
    log_ratio, pull = _log_ratio_and_pull(tokens)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    is_clipped = ratio != clipped
    slope = clipped.mul_(pull)
    return blank_(tokens.mask, slope * tokens.logprobs), slope, summed(log_ratio, is_clipped)


@_by_hand
def gpg(tokens: PolicyTokens, options: PolicyOptions) -> Terms:
    """−A·log π: the plain policy gradient (GPG)."""
    log_ratio, pull = _log_ratio_and_pull(tokens)
    return blank_(tokens.mask, pull * tokens.logprobs), pull, summed(log_ratio)


def geo_mean(tokens: PolicyTokens, options: PolicyOptions) -> TokenLoss:
    """−A·(geometric mean of the sequence's clipped ratios), the same value on each token of the sequence (GMPO).

    clip_low and clip_high bound the log-ratio; A is the sequence's mean advantage. Meant for seq-mean-token-mean.
    """
    lengths = tokens.lengths
    log_ratio, advantages = blank(tokens.mask, tokens.logprobs - tokens.old_logprobs, tokens.advantages)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    counts = row_counts(tokens.mask, lengths, log_ratio.dtype).clamp(min=1)
    # The pessimistic one of log-ratio and clipped log-ratio: only the side that A pushes to is bounded.
    sign = advantages.sign()
    bound = 0.5 * (options.clip_high + options.clip_low) + 0.5 * (options.clip_high - options.clip_low) * sign
    pessimistic = sign * torch.minimum(sign * log_ratio, bound)
    mean = row_sum(pessimistic, lengths) / counts
    sequence = -row_sum(advantages, lengths) / counts * mean.exp()  # [B]
    if tokens.weights is not None:
        log_weights = blank(tokens.mask, (tokens.weights + 1e-10).log())
        sequence = sequence * (row_sum(log_weights, lengths) / counts).exp()
    outside = (log_ratio.detach() > options.clip_high) | (log_ratio.detach() < -options.clip_low)
    metrics = summed(log_ratio, outside & (advantages > 0), outside & (advantages < 0))
    return TokenLoss(blank(tokens.mask, per_token(sequence, lengths)), metrics)


@_by_hand
def sapo(tokens: PolicyTokens, options: PolicyOptions) -> Terms:
    """−A·σ(τ(ρ − 1))·4/τ, τ by the sign of A: a soft gate instead of a clip (SAPO)."""
    log_ratio, pull = _log_ratio_and_pull(tokens)
    ratio = log_ratio.exp()
    is_positive = (-pull).sign_().clamp_(min=0.0)  # 1 or 0; torch.where is slow on a CPU
    tau = is_positive.mul_(options.sapo_tau_positive - options.sapo_tau_negative).add_(options.sapo_tau_negative)
    gate = (ratio - 1.0).mul_(tau).sigmoid_()
    losses = (gate * pull).div_(tau).mul_(4.0)
    slope = ratio.mul_(gate).mul_(1.0 - gate).mul_(pull).mul_(4.0)
    return losses, blank_(log_ratio.abs() < MAX_LOG_RATIO, slope), summed(log_ratio)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "sapo": sapo,
}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> TokenLoss:
    """½·max((v − R)², (clip(v, v_old ± clip) − R)²) per token, all [N]; a `clip` of 0 turns clipping off."""
    with torch.no_grad():
        error = blank_(mask, values - returns)
        losses, slope, is_clipped = error.square(), error, None
        if clip > 0:
            near = torch.clamp(values, old_values - clip, old_values + clip)
            clipped = blank_(mask, near.sub_(returns).square_())
            is_clipped = clipped > losses
            losses, slope = torch.maximum(losses, clipped, out=clipped), blank_(~is_clipped, error)
        losses.mul_(0.5)
        zero = losses.new_zeros(())
        sums = {
            "critic/vf_clipfrac": zero if is_clipped is None else torch.count_nonzero(is_clipped),
            "critic/vpred_mean": masked_sum(values, mask),
        }
    return TokenLoss(differentiable(values, losses, slope), sums)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each token's distribution: [N, V] → [N]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
