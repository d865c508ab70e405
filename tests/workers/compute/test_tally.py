"""Figures of an update, over its micro-batches and over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tqppo.workers.compute.tally import Figures, Loss, ReportNames, Tally


def alone(numbers: Sequence[float]) -> list[list[float]]:
    return [list(numbers)]


def test_shares_of_a_loss_add_up_and_sums_are_per_token() -> None:
    tally = Tally()
    for share in (0.25, 0.5):
        value = torch.tensor(share)
        tally.add(Loss(value, {"actor/pg_loss": value}, {"actor/ppo_kl": torch.tensor(6.0)}), tokens=24.0)
    assert dict(tally.totals) == {"actor/pg_loss": 0.75, "actor/ppo_kl": 0.5}


def loss_of(values: list[float]) -> Loss:
    """The figures of a micro-batch that has these values; it may have none."""
    found = torch.tensor(values)
    mean = {"mass": (found.sum(), torch.tensor(len(values)))}
    bounds = torch.cat([found, torch.tensor([torch.inf])]).min(), torch.cat([found, torch.tensor([-torch.inf])]).max()
    return Loss(torch.zeros(()), {}, figures=Figures(mean, dict(zip(("mass_min", "mass_max"), bounds, strict=True))))


REPORT = ReportNames((), ("mass",), ("mass_min", "mass_max"))


@pytest.mark.parametrize("cut", [[[1.0, 5.0, 3.0]], [[1.0], [5.0], [], [3.0]], [[3.0, 5.0], [1.0]]])
def test_means_and_extremes_do_not_depend_on_the_cut(cut: list[list[float]]) -> None:
    tally = Tally()
    for values in cut:
        tally.add(loss_of(values), tokens=9.0)
    assert tally.joined(REPORT, alone) == {"mass": 3.0, "mass_min": 1.0, "mass_max": 5.0}


def test_figures_that_no_token_has_are_left_out() -> None:
    tally = Tally()
    tally.add(loss_of([]), tokens=1.0)
    assert tally.joined(REPORT, alone) == {}
    assert Tally().joined(REPORT, alone) == {}


def test_ranks_join_their_figures_and_one_without_rows_adds_nothing() -> None:
    tallies = [Tally(), Tally(), Tally()]
    for tally, values in zip(tallies, ([1.0, 5.0], [9.0], None), strict=True):
        if values is not None:
            tally.add(loss_of(values), tokens=1.0)
    sent: list[list[float]] = []

    def collect(numbers: Sequence[float]) -> list[list[float]]:
        sent.append(list(numbers))
        return [list(numbers)]

    for tally in tallies:
        tally.joined(REPORT, collect)
    assert all(
        tally.joined(REPORT, lambda _: sent) == {"mass": 5.0, "mass_min": 1.0, "mass_max": 9.0} for tally in tallies
    )
