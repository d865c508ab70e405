from __future__ import annotations

import math

import pytest
import torch

from tqppo.workers.compute.comparison import StudentScores
from tqppo.workers.compute.divergence_figures import DivergenceFigures


def scores(losses: list[float], masses: list[float] | None = None) -> StudentScores:
    value = torch.tensor(losses)
    if masses is None:
        return StudentScores(None, None, value)
    mass = torch.tensor(masses)
    return StudentScores(None, None, value, mass, mass / 2, torch.full_like(mass, 3.0), -mass)


def test_figures_are_of_the_tokens_that_count_and_of_each_teacher() -> None:
    figures = DivergenceFigures("k1", ("a", "b"))
    mask, teacher = torch.tensor([True, True, False, True]), torch.tensor([0, 1, 1, 0])
    found = figures.of(scores([1.0, -2.0, 9.0, 4.0]), mask, teacher, width=1)
    assert tuple(found.means) == figures.mean_names
    assert tuple(found.extremes) == figures.extreme_names
    assert {k: float(total) / float(count) for k, (total, count) in found.means.items()} == {
        "distillation/loss": 1.0,
        "distillation/abs_loss": pytest.approx(7 / 3),
        "distillation/a/loss": 2.5,
        "distillation/a/abs_loss": 2.5,
        "distillation/b/loss": -2.0,
        "distillation/b/abs_loss": 2.0,
    }
    assert found.extremes["distillation/loss_min"] == -2.0
    assert found.extremes["distillation/loss_max"] == 4.0
    assert found.extremes["distillation/a/loss_min"] == 1.0


def test_top_k_losses_have_masses_and_overlaps() -> None:
    figures = DivergenceFigures("forward_kl_topk", ("only",))
    found = figures.of(scores([1.0, 3.0], [0.5, 0.9]), torch.ones(2).bool(), torch.zeros(2).long(), width=6)
    names = {"loss", "student_mass", "teacher_mass", "overlap_ratio", "overlap_token_advantage"}
    assert {name.removeprefix("distillation/") for name in figures.mean_names} == names
    assert float(found.means["distillation/overlap_ratio"][0]) == 1.0  # 3 of 6, twice
    assert found.extremes["distillation/teacher_mass_max"] == pytest.approx(0.45)


@pytest.mark.parametrize("size", [0, 2])
def test_no_token_gives_a_count_of_0_and_infinite_extremes(size: int) -> None:
    figures = DivergenceFigures("reverse_kl", ("only",))
    found = figures.of(scores([1.0] * size), torch.zeros(size).bool(), torch.zeros(size).long(), width=1)
    assert float(found.means["distillation/loss"][1]) == 0
    assert [float(each) for each in found.extremes.values()] == [math.inf, -math.inf]
