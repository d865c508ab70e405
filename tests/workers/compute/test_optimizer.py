from __future__ import annotations

import math

import pytest
import torch

from tqppo.workers.compute.optimizer import Optimizer, learning_rate
from tqppo.workers.specs import OptimizerSpec


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {1: 0.5, 2: 1.0, 3: 1.0, 6: 1.0, 9: 1.0}),
        ("linear", {1: 0.5, 2: 1.0, 3: 1.0, 4: 0.8125, 6: 0.4375, 7: 0.25, 9: 0.25}),
        ("cosine", {2: 1.0, 3: 1.0, 5: 0.625, 7: 0.25, 9: 0.25}),
    ],
)
def test_learning_rate_by_hand(schedule: str, expected: dict[int, float]) -> None:
    spec = OptimizerSpec(lr=1.0, total_steps=6, schedule=schedule, warmup_steps=2, min_lr_ratio=0.25)
    assert {step: learning_rate(spec, step) for step in expected} == pytest.approx(expected)


def model_with(gradient: float) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model.weight.grad = torch.full_like(model.weight, gradient)
    return model


def test_norm_is_reported_before_clipping() -> None:
    model = model_with(3.0)
    norm, is_taken = Optimizer(model, OptimizerSpec(grad_clip=1.0)).step(0.1)
    assert (norm, is_taken) == (pytest.approx(math.sqrt(18)), True)
    assert model.weight.grad is None


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(gradient: float) -> None:
    model = model_with(gradient)
    optimizer = Optimizer(model, OptimizerSpec(weight_decay=0.1))
    norm, is_taken = optimizer.step(0.1)
    assert not math.isfinite(norm)
    assert not is_taken
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert optimizer.state() == {}


def test_first_step_is_the_learning_rate_against_the_sign() -> None:
    model = model_with(3.0)
    Optimizer(model, OptimizerSpec(grad_clip=0.0)).step(0.1)
    assert model.weight.flatten().tolist() == pytest.approx([0.9, 0.9], abs=1e-5)
