"""KL divergence of a policy from its reference: estimators per token, and the controller of its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tqppo.algorithms.layout import apply_mask, row_counts, row_sum

ESTIMATORS = ("k1", "abs", "k2", "k3")


def estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KL(policy ‖ reference) per sampled token, by one of k1, abs, k2, k3; all [N], 0 where `mask` is false.

    k1 = d, abs = |d|, k2 = d²/2, k3 = e^−d + d − 1 with d = log π − log π_ref; k3 clamps d to ±20 and itself to 10.
    With a `+` the value is the estimator's and the gradient is k2's, the only one whose expectation is that of the KL.
    """
    d = apply_mask(mask, logprobs - ref_logprobs)
    value = _by_kind(kind.removesuffix("+"), d)
    if not kind.endswith("+"):
        return value
    k2 = _by_kind("k2", d)
    return value.detach() + (k2 - k2.detach())


def _by_kind(kind: str, d: Tensor) -> Tensor:
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return 0.5 * d.square()
    assert kind == "k3", f"unknown KL estimator {kind!r}; known: {', '.join(ESTIMATORS)}, each also with a +"
    safe = d.clamp(-20.0, 20.0)
    return (torch.expm1(-safe) + safe).clamp(max=10.0)


def mean_over_rows(kl: Tensor, mask: Tensor, lengths: Tensor) -> float:
    """Mean over rows of the mean over their tokens; rows without a token that counts (padding) are left out."""
    counts = row_counts(mask, lengths, torch.float64)  # [B]
    means = row_sum(apply_mask(mask, kl).double(), lengths) / counts.clamp(min=1)
    return float(means.sum() / (counts > 0).sum().clamp(min=1))


@dataclass(frozen=True, slots=True)
class Controller:
    """β of the KL in the reward. Fixed if `target` is None, otherwise adjusted so that the KL stays near it."""

    coef: float
    target: float | None = None
    horizon: float = 10_000.0

    def after(self, kl: float, num_rows: int) -> Controller:
        """The controller after a step: β ← β (1 + clip(KL / target − 1, ±0.2) · rows / horizon), of real rows."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_rows / self.horizon))
