"""How far a policy is from its reference: estimators per token, KL in the reward, and the controllers of its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tqppo.algorithms.layout import blank, blank_, differentiable, row_counts, row_sum

ESTIMATORS = ("k1", "abs", "k2", "k3")


def estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KL(policy ‖ reference) per sampled token, by one of k1, abs, k2, k3; all [N], 0 where `mask` is false.

    k1 = d, abs = |d|, k2 = d²/2, k3 = e^−d + d − 1 with d = log π − log π_ref; k3 clamps d to ±20 and itself to 10.
    With a `+` the value is the estimator's and the gradient is k2's, the only one whose expectation is that of the KL.
    """
    with torch.no_grad():
        d = blank_(mask, logprobs - ref_logprobs)
        value, slope = _value_and_slope(kind.removesuffix("+"), d, mask)
    return differentiable(logprobs, value, d if kind.endswith("+") else slope)


def _value_and_slope(kind: str, d: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "k1":
        return d, mask.to(d.dtype)
    if kind == "abs":
        return d.abs(), d.sign()
    if kind == "k2":
        return 0.5 * d.square(), d
    assert kind == "k3", f"unknown KL estimator {kind!r}; known: {', '.join(ESTIMATORS)}, each also with a +"
    safe = d.clamp(-20.0, 20.0)
    slope = torch.expm1(-safe)  # minus the slope, for now
    value = slope + safe
    return value.clamp(max=10.0), blank_(value <= 10.0, slope.neg_())


def mean_over_rows(kl: Tensor, mask: Tensor, lengths: Tensor) -> float:
    """Mean over rows of the mean over their tokens; rows without a token that counts (padding) are left out."""
    counts = row_counts(mask, lengths, torch.float64)  # [B]
    means = row_sum(blank(mask, kl).double(), lengths) / counts.clamp(min=1)
    return float(means.sum() / (counts > 0).sum().clamp(min=1))


@dataclass(frozen=True, slots=True)
class Controller:
    """β of the KL in the reward. Fixed when `target` is None, otherwise steered so that the KL stays near it."""

    coef: float
    target: float | None = None
    horizon: float = 10_000.0

    def after(self, kl: float, num_rows: int) -> Controller:
        """β ← β (1 + clip(KL / target − 1, ±0.2) · rows / horizon), rows being real ones."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_rows / self.horizon))
