"""The value function: values before each response token, and its clipped regression to the returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tqppo import dataflow
from tqppo.algorithms.aggregate import Normalisers, aggregate
from tqppo.algorithms.losses import value_loss
from tqppo.protocols import Metrics
from tqppo.workers.compute.learner import Learner, Selection
from tqppo.workers.compute.microbatch import FlatRows, MicroBatch
from tqppo.workers.compute.model import RoleModel, load_value_model
from tqppo.workers.compute.tally import Loss, ReportNames
from tqppo.workers.process.bridge import Columns, implements


class Critic(Learner):
    prefix = "critic"

    @property
    def report(self) -> ReportNames:
        return ReportNames(("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"))

    def _load(self) -> RoleModel:
        return load_value_model(self.spec.model, self.device)

    @implements(dataflow.VALUES)
    def values(self, rows: Columns) -> dict[str, Tensor]:
        (result,) = self.per_token(rows, lambda micro: (self.model(micro),))
        return {"values": result}

    @implements(dataflow.CRITIC_UPDATE)
    def update(self, rows: Columns, *, step: int, sizes: Sequence[int] = ()) -> Metrics:
        """Take one optimizer step per mini-batch and epoch, as `Actor.update` does."""
        return self.train(rows, step=step, sizes=sizes)

    def _idle_loss(self, micro: MicroBatch) -> Tensor:
        values: Tensor = self.model(micro)
        return values.sum() * 0.0

    def _selection(self, rows: FlatRows) -> Selection:
        keep = rows.response["loss_mask" if self.features.has_loss_mask else "response_mask"]
        counts = rows.count(keep)
        return Selection(keep, (counts,), counts > 0, rows.row.get("session_weight", torch.ones(len(rows))))

    def _loss(self, rows: FlatRows, micro: MicroBatch, whole: Sequence[Normalisers]) -> Loss:
        spec = self.spec.value_loss
        tokens = self.tokens(rows, micro)
        values = self.model(micro)
        losses = value_loss(values, tokens.column("values"), tokens.column("returns"), tokens.mask, clip=spec.clip)
        total = aggregate(
            losses.losses,
            tokens.mask,
            tokens.lengths,
            spec.aggregate,
            whole[0],
            horizon=spec.horizon,
            session_weights=tokens.session_weights,
        )
        return Loss(total, {"critic/vf_loss": total}, losses.sums)
