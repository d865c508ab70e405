"""The policy that learns from teachers: its loss is the divergence from them, alone or added to the policy loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tqppo.algorithms import distillation
from tqppo.algorithms.aggregate import Normalisers
from tqppo.algorithms.layout import apply_mask
from tqppo.workers.actor import Actor
from tqppo.workers.compute.comparison import Comparison, StudentScores
from tqppo.workers.compute.divergence_figures import DivergenceFigures
from tqppo.workers.compute.learner import Selection, Tokens
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.microbatch import FlatRows, MicroBatch
from tqppo.workers.compute.output_layer import load_output_layer
from tqppo.workers.compute.tally import Figures, Loss, ReportNames
from tqppo.workers.specs import DistillSpec

_CLIPPING = ("distillation/pg_clipfrac", "distillation/pg_clipfrac_lower", "distillation/ppo_kl")


class Student(Actor):
    """An actor with teachers. `Features.has_policy_loss` says whether the task's reward counts too."""

    def start(self) -> None:
        distillation.check_update(self.distill.loss, self.distill.update)
        teachers = self.distill.teachers
        self.figures = DivergenceFigures(self.distill.loss, tuple(teacher.name for teacher in teachers))
        super().start()
        paths = [teacher.path for teacher in teachers] if self.features.teacher_hidden else []
        trust = self.spec.model.trust_remote_code
        self.layers = tuple(load_output_layer(p, self.dtype, self.device, trust_remote_code=trust) for p in paths)

    def device_tensors(self) -> Iterator[Tensor]:
        yield from super().device_tensors()
        for layer in self.layers:
            yield from (tensor for tensor in (layer.weight, layer.bias) if tensor is not None)

    @property
    def distill(self) -> DistillSpec:
        assert self.spec.distill is not None, "a student needs RoleSpec.distill"
        return self.spec.distill

    @property
    def report(self) -> ReportNames:
        shares = super().report.shares if self.features.has_policy_loss else ("actor/loss",)
        loss, *means = self.figures.mean_names  # the loss over all tokens is a share, in the mode of the config
        if not self.features.distills_by_policy_gradient:
            return ReportNames((*shares, loss), tuple(means), self.figures.extreme_names)
        return ReportNames((*shares, loss, "distillation/pg_loss"), (*_CLIPPING, *means), self.figures.extreme_names)

    def _distilled(self, rows: FlatRows) -> Tensor:
        """Which response tokens the divergence counts: [ΣR] bool."""
        keep = rows.response["loss_mask" if self.features.has_loss_mask else "response_mask"]
        return keep & ~self._is_special(rows.response_tokens())

    def _is_special(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(self.distill.special_ids, dtype=tokens.dtype, device=tokens.device))

    def _selection(self, rows: FlatRows) -> Selection:
        keep = self._distilled(rows)
        counts = rows.count(keep)
        if not self.features.has_policy_loss:
            ones = torch.ones(len(rows))
            return Selection(keep, (counts,), counts > 0, rows.row.get("session_weight", ones))
        policy = super()._selection(rows)
        return replace(policy, counts=(*policy.counts, counts), active=policy.active | (counts > 0))

    def _loss(self, rows: FlatRows, micro: MicroBatch, whole: Sequence[Normalisers]) -> Loss:
        tokens = self.tokens(rows, micro)
        distilled = replace(tokens, mask=~self._is_special(micro.targets))
        scores = self._compare(micro, distilled, self._scoring())
        loss = self._distillation_loss(scores, distilled, whole[-1])
        if not self.features.has_policy_loss:
            return loss
        assert scores.logprobs is not None, "asked for"
        assert scores.entropy is not None, "asked for"
        policy = self._policy_loss(scores.logprobs, scores.entropy, tokens, whole[0])
        total = policy.value + self.distill.coef * loss.value
        return Loss(total, {**policy.parts, **loss.parts, "actor/loss": total}, policy.sums, loss.figures)

    def _scoring(self) -> Scoring | None:
        """What the losses that compare policies need, at the sampling temperature."""
        if not self.features.needs_old_policy:
            return None
        return Scoring(self.spec.temperature, with_entropy=self.features.has_policy_loss)

    def _compare(self, micro: MicroBatch, tokens: Tokens, scoring: Scoring | None) -> StudentScores:
        spec = self.distill
        comparison = Comparison(
            spec.loss,
            self._teacher_columns(tokens),
            logprob_min=spec.logprob_min or None,
            loss_max=spec.loss_max or None,
            layers=self.layers,
            scoring=scoring,
            is_backpropagated=not self.features.distills_by_policy_gradient,
        )
        return StudentScores(*self.model(micro, comparison))

    def _teacher_columns(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """What the teachers say of these tokens, as `Comparison` takes it."""
        # Tokens that do not count get harmless values: even 0 times a NaN would reach the gradient.
        counts = tokens.mask[:, None]
        if self.features.teacher_hidden:
            hidden = apply_mask(counts, tokens.sequence_column("teacher_hidden"))
            return hidden, tokens.row_column("teacher_index")
        logprobs = apply_mask(counts, tokens.sequence_column("teacher_logprobs"))
        if self.features.teacher_top_k:
            return tokens.sequence_column("teacher_ids"), logprobs
        return (logprobs[:, 0],)

    def _distillation_loss(self, scores: StudentScores, tokens: Tokens, whole: Normalisers) -> Loss:
        """The divergence, backpropagated or as the negative advantage of a policy gradient."""
        total = divergence = self._aggregate(scores.losses, tokens, whole)
        parts = {self.figures.mean_names[0]: divergence}
        figures = self._figures(scores, tokens)
        if self.features.distills_by_policy_gradient:
            assert scores.logprobs is not None, "asked for"
            policy_tokens = self._policy_tokens(scores.logprobs, scores.losses, tokens)
            found = distillation.as_policy_gradient(scores.losses, policy_tokens, self.distill.options)
            total = parts["distillation/pg_loss"] = self._aggregate(found.losses, tokens, whole)
            count = torch.count_nonzero(tokens.mask)
            figures = replace(figures, means={**figures.means, **{name: (s, count) for name, s in found.sums.items()}})
        return Loss(total, {"actor/loss": total, **parts}, figures=figures)

    def _figures(self, scores: StudentScores, tokens: Tokens) -> Figures:
        return self.figures.of(
            scores, tokens.mask, tokens.row_column("teacher_index"), width=max(1, self.features.teacher_top_k)
        )
