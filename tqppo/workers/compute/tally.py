"""The figures of one update: collected on a rank over its micro-batches, then joined over the ranks.

None of them depends on how the rows were cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tqppo.protocols import Metrics

Gather = Callable[[Sequence[float]], list[list[float]]]  # one rank's numbers → every rank's


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that only some tokens have, such as those of one teacher; without such a token they are left out.

    `means` are pairs of a sum and the number of tokens in it. `extremes` end in `_min` or `_max`, and are ±∞ without a
    token.
    """

    means: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    extremes: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's share of the mini-batch's loss, and the metrics to report.

    `parts` are shares too, so they add up; `sums` are over tokens and get divided by the tokens trained on.
    """

    value: Tensor
    parts: Mapping[str, Tensor]
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)


@dataclass(frozen=True, slots=True)
class ReportNames:
    """Names of the metrics that a role reports, the same on every rank: one without rows joins the others' figures."""

    shares: tuple[str, ...]  # parts and sums
    means: tuple[str, ...] = ()
    extremes: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """Figures of one update on this rank, over its micro-batches and mini-batches."""

    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    extremes: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    num_trained: int = 0
    num_skipped: int = 0
    num_all_padding: int = 0
    num_without_signal: int = 0

    def add(self, loss: Loss, tokens: float) -> None:
        numbers = iter(_numbers([*loss.parts.values(), *loss.sums.values()]))
        for name in loss.parts:
            self.totals[name] += next(numbers)
        for name in loss.sums:
            self.totals[name] += next(numbers) / tokens
        self._add_figures(loss.figures)

    def _add_figures(self, figures: Figures) -> None:
        pairs = [number for pair in figures.means.values() for number in pair]
        numbers = iter(_numbers([*pairs, *figures.extremes.values()]))
        for name in figures.means:
            self.sums[name] += next(numbers)
            self.counts[name] += next(numbers)
        for name in figures.extremes:
            self.extremes[name] = _farther(name, self.extremes.get(name, nothing(name)), next(numbers))

    def joined(self, report: ReportNames, gather: Gather) -> Metrics:
        """The figures of all ranks together, the same on every rank. Shares are means over the optimizer steps."""
        steps = max(1, self.num_trained)
        mine = [self.totals[name] / steps for name in report.shares]
        mine += [self.sums[name] for name in report.means] + [self.counts[name] for name in report.means]
        mine += [self.extremes.get(name, nothing(name)) for name in report.extremes]
        columns = iter(zip(*gather(mine), strict=True))
        metrics = {name: sum(next(columns)) for name in report.shares}
        sums = {name: sum(next(columns)) for name in report.means}
        counts = {name: sum(next(columns)) for name in report.means}
        metrics |= {name: sums[name] / counts[name] for name in report.means if counts[name]}
        extremes = {name: _farther(name, *next(columns)) for name in report.extremes}
        return metrics | {name: value for name, value in extremes.items() if value != nothing(name)}


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The values of scalar tensors, in one copy from the device."""
    return torch.stack([each.detach().float() for each in tensors]).tolist() if tensors else []


def _farther(name: str, *values: float) -> float:
    return min(values) if name.endswith("min") else max(values)


def nothing(name: str) -> float:
    """The smallest or largest of no values."""
    return math.inf if name.endswith("min") else -math.inf
