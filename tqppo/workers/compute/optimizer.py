"""AdamW with a learning rate that is a pure function of the training step; skips gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tqppo.weights.shards import is_sharded, whole
from tqppo.workers.specs import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """The learning rate of training step `step`, counted from 1. Warm-up ends and decay starts at `warmup_steps`."""
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    progress = min(1.0, (step - 1 - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
    share = 1.0 - progress if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * share)


class Optimizer:
    """AdamW over the trainable parameters, which it keeps by name."""

    def __init__(self, model: nn.Module, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._adamw = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            weight_decay=spec.weight_decay,
            **({"foreach": True} if any(map(is_sharded, self.parameters.values())) else {"fused": True}),
        )

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip the gradients, take a step, drop them. Returns the norm before clipping and whether a step was taken.

        A norm that is not finite leaves parameters and moments unchanged.
        """
        norm = self._clip()
        is_taken = math.isfinite(norm)
        if is_taken:
            self._adamw.param_groups[0]["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm, is_taken

    def _clip(self) -> float:
        limit = self.spec.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), limit, foreach=True)
        return float(whole(norm))

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by `moment.parameter`; empty before the first step."""
        found = {}
        for name, parameter in self.parameters.items():
            for moment, value in self._adamw.state.get(parameter, {}).items():
                found[f"{moment}.{name}"] = value
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; tensors must be sharded like the parameters."""
        self._adamw.state.clear()
        for key, value in state.items():
            moment, name = key.split(".", 1)
            self._adamw.state[self.parameters[name]][moment] = value
