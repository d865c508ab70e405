"""Rollout correction for engines whose log-probabilities differ from the trainer's for the same weights.

Importance weights multiply the policy loss; rejection shrinks the mask. Neither has a gradient.
Flat layout, see `layout`; `log_ratio` is log π_trainer − log π_engine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tqppo.algorithms.layout import apply_mask, masked_mean, per_token, row_counts, row_max, row_mean, row_sum
from tqppo.protocols import Metrics

SAFE = 20.0  # log-ratios are clamped to ± this before exp
# Those of the diagnostics that add up over tokens, and those that are a maximum over them.
GAP_MEANS = (
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "training/rollout_probs_diff_mean",
)
GAP_MAXIMA = ("rollout_corr/log_ratio_max", "training/rollout_probs_diff_max")


def log_ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-ratios of trainer to engine, without gradient: [N] each; 0 where `mask` is false."""
    return apply_mask(mask, old_logprobs.detach() - rollout_logprobs.detach())


def importance_weights(
    kind: str, log_ratio: Tensor, mask: Tensor, lengths: Tensor, *, cap: float, floor: float = 0.0
) -> Tensor:
    """Weights [N], 0 where `mask` is false.

    token     min(ratio, cap)
    sequence  min(product of the sequence's ratios, cap), the same on each of its tokens
    icepop    ratio where floor ≤ ratio ≤ cap, otherwise 0
    """
    ratio = _sequence_log_ratio(log_ratio, lengths) if kind == "sequence" else log_ratio
    ratio = ratio.clamp(-SAFE, SAFE).exp()
    if kind == "icepop":
        return apply_mask(mask & (ratio >= floor) & (ratio <= cap), ratio)
    assert kind in ("token", "sequence"), f"unknown correction {kind!r}; known: token, sequence, icepop"
    return apply_mask(mask, ratio.clamp(max=cap))


def reject(kind: str, log_ratio: Tensor, mask: Tensor, lengths: Tensor, *, threshold: float) -> Tensor:
    """The mask [N] without the tokens (kind `token`) or the sequences (`seq_sum`, `seq_mean`, `seq_max`) too far off.

    The ratio (of the token; summed, averaged or largest over the sequence in the log) must lie within
    [1/threshold, threshold].
    """
    per = log_ratio.clamp(-SAFE, SAFE)
    limit = math.log(threshold)
    if kind == "token":
        return mask & (per.abs() <= limit)
    if kind == "seq_max":
        measured = row_max(apply_mask(mask, per.abs()), lengths, initial=0.0)
    elif kind == "seq_sum":
        measured = row_sum(apply_mask(mask, per), lengths)
    else:
        assert kind == "seq_mean", f"unknown rejection {kind!r}; known: token, seq_sum, seq_mean, seq_max"
        measured = row_mean(per, mask, lengths)
    return mask & per_token(measured.abs() <= limit, lengths)


def _sequence_log_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    return per_token(row_sum(log_ratio, lengths), lengths)


def diagnostics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, lengths: Tensor) -> Metrics:
    """Differences between engine and trainer over the tokens that count and the rows that have one; {} if none does."""
    if not bool(mask.any()):
        return {}
    real = row_counts(mask, lengths) > 0
    log_ratio = log_ratios(old_logprobs, rollout_logprobs, mask)
    safe = log_ratio.clamp(-SAFE, SAFE)
    trainer, engine = (-row_mean(each.detach(), mask, lengths)[real] for each in (old_logprobs, rollout_logprobs))
    sums = row_sum(log_ratio, lengths)[real].clamp(-SAFE, SAFE)
    metrics = {
        "rollout_corr/kl": -masked_mean(log_ratio, mask),
        "rollout_corr/k3_kl": masked_mean(torch.expm1(safe) - safe, mask),
        "rollout_corr/log_ratio_max": log_ratio.abs().max(),
        "rollout_corr/chi2_token": masked_mean(torch.expm1(2.0 * safe), mask),
        "rollout_corr/chi2_seq": torch.expm1(2.0 * sums).mean(),
        "rollout_corr/training_log_ppl": trainer.mean(),
        "rollout_corr/training_ppl": trainer.exp().mean(),
        "rollout_corr/rollout_log_ppl": engine.mean(),
        "rollout_corr/rollout_ppl": engine.exp().mean(),
        "rollout_corr/log_ppl_diff": (trainer - engine).mean(),
        "rollout_corr/log_ppl_abs_diff": (trainer - engine).abs().mean(),
    }
    return {name: float(value) for name, value in metrics.items()} | probability_gap(
        old_logprobs, rollout_logprobs, mask
    )


def token_gaps(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """The differences named in `GAP_MEANS` and `GAP_MAXIMA`, of each token: [N]."""
    log_ratio = old_logprobs.detach() - rollout_logprobs
    safe = log_ratio.clamp(-SAFE, SAFE)
    gap = (old_logprobs.detach().exp() - rollout_logprobs.exp()).abs()
    return {
        "rollout_corr/kl": -log_ratio,
        "rollout_corr/k3_kl": torch.expm1(safe) - safe,
        "rollout_corr/chi2_token": torch.expm1(2.0 * safe),
        "rollout_corr/log_ratio_max": log_ratio.abs(),
        "training/rollout_probs_diff_mean": gap,
        "training/rollout_probs_diff_max": gap,
    }


def probability_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Metrics:
    """Differences of the probabilities themselves, and their correlation (Pearson)."""
    ours, theirs = old_logprobs.detach()[mask].double().exp(), rollout_logprobs.detach()[mask].double().exp()
    if ours.numel() < 2:
        return {}
    gap = (ours - theirs).abs()
    a, b = ours - ours.mean(), theirs - theirs.mean()
    spread = (a.square().sum() * b.square().sum()).sqrt()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_std": float(gap.std()),
        "training/rollout_actor_probs_pearson_corr": float((a * b).sum() / spread) if float(spread) > 0 else 1.0,
    }


def weight_metrics(weights: Tensor, mask: Tensor, kept: Tensor) -> Metrics:
    """Statistics of importance weights [N], and of the tokens of `mask` that rejection `kept`; {} if no token counts.

    eff_sample_size is (Σw)² / (n Σw²): 1 if all weights are equal, 1/n if only one is not 0.
    """
    chosen = weights.detach()[mask]
    if chosen.numel() == 0:
        return {}
    square = chosen.square().mean()
    metrics = {
        "rollout_corr/rollout_is_mean": chosen.mean(),
        "rollout_corr/rollout_is_max": chosen.max(),
        "rollout_corr/rollout_is_min": chosen.min(),
        "rollout_corr/rollout_is_std": chosen.std(correction=0),
        "rollout_corr/rollout_is_eff_sample_size": chosen.mean().square() / square.clamp(min=1e-30),
        "rollout_corr/rollout_rs_masked_fraction": (mask & ~kept).sum() / mask.sum(),
    }
    return {name: float(value) for name, value in metrics.items()}
