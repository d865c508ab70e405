"""The metrics of a student's divergence from its teachers: over all tokens and, with several teachers, for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tqppo.algorithms import kl, top_k
from tqppo.algorithms.layout import masked_sum
from tqppo.workers.compute.comparison import StudentScores
from tqppo.workers.compute.tally import Figures, nothing

PREFIX = "distillation"
_OF_TOP_K = ("student_mass", "teacher_mass", "overlap_ratio", "overlap_token_advantage")
_ENDS = ("min", "max")


@dataclass(frozen=True, slots=True)
class DivergenceFigures:
    """Which figures a loss has, and their values. The first mean is the loss over all tokens."""

    loss: str
    teachers: tuple[str, ...]

    @property
    def mean_names(self) -> tuple[str, ...]:
        return tuple(f"{prefix}/{name}" for prefix in self._prefixes for name in self._means)

    @property
    def extreme_names(self) -> tuple[str, ...]:
        return tuple(f"{prefix}/{name}_{end}" for prefix in self._prefixes for name in self._ranges for end in _ENDS)

    @property
    def _prefixes(self) -> tuple[str, ...]:
        """A single teacher's figures are those of all tokens."""
        return (PREFIX, *(f"{PREFIX}/{name}" for name in self.teachers)) if len(self.teachers) > 1 else (PREFIX,)

    @property
    def _means(self) -> tuple[str, ...]:
        if self.loss in top_k.KINDS:
            return ("loss", *_OF_TOP_K)
        return ("loss", "abs_loss") if self.loss in kl.ESTIMATORS else ("loss",)

    @property
    def _ranges(self) -> tuple[str, ...]:
        return ("loss", "student_mass", "teacher_mass") if self.loss in top_k.KINDS else ("loss",)

    @torch.no_grad()
    def of(self, scores: StudentScores, mask: Tensor, teacher: Tensor, width: int) -> Figures:
        """The figures of tokens [N] that count in `mask`, scored by the teachers with these numbers.

        `width` is the number of tokens that a top-k loss compares.
        """
        values = self._values(scores, width)
        masks = [mask, *(mask & (teacher == i) for i in range(len(self._prefixes) - 1))]
        means: dict[str, tuple[Tensor, Tensor]] = {}
        extremes: dict[str, Tensor] = {}
        for prefix, counted in zip(self._prefixes, masks, strict=True):
            number = torch.count_nonzero(counted)
            means |= {f"{prefix}/{name}": (masked_sum(values[name], counted), number) for name in self._means}
            for name in self._ranges:
                extremes |= {f"{prefix}/{name}_{end}": _extreme(values[name], counted, end) for end in _ENDS}
        return Figures(means, extremes)

    def _values(self, scores: StudentScores, width: int) -> dict[str, Tensor]:
        found = {"loss": scores.losses, "abs_loss": scores.losses.abs()}
        if scores.overlap is not None:
            ratio = scores.overlap / width
            of_top_k = (scores.student_mass, scores.teacher_mass, ratio, scores.overlap_advantage)
            found |= {name: each for name, each in zip(_OF_TOP_K, of_top_k, strict=True) if each is not None}
        return found


def _extreme(values: Tensor, mask: Tensor, end: str) -> Tensor:
    """The smallest or largest value that counts; ±∞ if none does."""
    unset = values.new_full((1,), nothing(end))
    found = torch.cat([torch.where(mask, values, unset), unset])
    return found.amin() if end == "min" else found.amax()
