"""What a student is asked of each token's logits: how far it is from its teacher, and what a policy loss needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tqppo.algorithms import distillation, top_k, whole_vocabulary
from tqppo.algorithms.top_k import Teacher, TopK
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.output_layer import OutputLayer


class StudentScores(NamedTuple):
    """Results per token [N]."""

    logprobs: Tensor | None  # at the sampling temperature, where a loss compares the policy with the old one
    entropy: Tensor | None  # with a policy loss
    losses: Tensor  # the divergence from the teacher
    student_mass: Tensor | None = None  # this and the rest: of top-k losses, see `TopK`
    teacher_mass: Tensor | None = None
    overlap: Tensor | None = None
    overlap_advantage: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measures the divergence of the student from its teachers, both at temperature 1.

    `columns` are what the teachers say of the tokens: the sampled tokens' log-probabilities [N]; for top-k losses ids
    and log-probabilities [N, K]; for the whole vocabulary hidden states [N, H] and the teachers' numbers [N].
    """

    loss: str
    columns: tuple[Tensor, ...]
    logprob_min: float | None = None
    loss_max: float | None = None
    layers: tuple[OutputLayer, ...] = ()  # of the teachers, for the whole vocabulary
    scoring: Scoring | None = None  # what a policy loss needs
    is_backpropagated: bool = True  # False: the divergence is an advantage, which has no gradient

    def __call__(self, logits: Tensor, targets: Tensor, *columns: Tensor) -> StudentScores:
        logprobs, entropy = (None, None) if self.scoring is None else self.scoring(logits, targets)[:2]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_backpropagated):
            found = self._compare(logits, targets, columns, logprobs)
        losses = distillation.bounded(found[0], self.loss_max)
        return StudentScores(logprobs, entropy, losses, *found[1:])

    def _compare(
        self, logits: Tensor, targets: Tensor, columns: tuple[Tensor, ...], logprobs: Tensor | None
    ) -> TopK | tuple[Tensor]:
        if self.loss in top_k.KINDS:
            found = top_k.compare(self.loss, logits, Teacher(*columns), logprob_min=self.logprob_min)
            if self.loss == "reverse_kl_topk":
                return found
            # Without the rest of the vocabulary, a student that is ever sharper than its teacher would get below 0.
            return found._replace(losses=found.losses.clamp(min=0.0))
        if self.loss in whole_vocabulary.KINDS:
            theirs = teacher_logits(self.layers, *columns)
            return (whole_vocabulary.divergence(self.loss, logits, theirs, logprob_min=self.logprob_min),)
        is_known = self.scoring is not None and self.scoring.temperature == 1.0
        own = logprobs if is_known else Scoring(1.0)(logits, targets)[0]
        assert own is not None, "the scoring has log-probabilities"
        counted = torch.ones_like(targets, dtype=torch.bool)
        return (distillation.divergence(self.loss, own, columns[0], counted, logprob_min=self.logprob_min),)


@torch.no_grad()
def teacher_logits(layers: tuple[OutputLayer, ...], hidden: Tensor, number: Tensor) -> Tensor:
    """The logits of each token's own teacher, with the ids that all teachers have: [n, H], [n] → [n, V]."""
    if len(layers) == 1:
        return layers[0].logits(hidden)
    common = min(len(layer.weight) for layer in layers)
    logits = hidden.new_empty(len(hidden), common, dtype=torch.float32)
    for i, layer in enumerate(layers):
        mine = (number == i).nonzero().squeeze(-1)
        logits[mine] = layer.logits(hidden[mine])[:, :common]
    return logits
