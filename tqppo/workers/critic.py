"""The value function: values before each response token, and its clipped regression to the returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tqppo.algorithms.aggregate import Normalisers, aggregate
from tqppo.algorithms.losses import value_loss
from tqppo.workers.compute.learner import Learner, Loss, Metrics, Selection, even_sizes
from tqppo.workers.compute.microbatch import MicroBatch, Rows
from tqppo.workers.compute.model import load_value_model
from tqppo.workers.process.bridge import Columns, remote


def _update_columns(worker: Critic) -> tuple[str, ...]:
    loss = worker.spec.value_loss
    optional = {"loss_mask": loss.has_loss_mask, "session_weight": loss.aggregate == "session-mean"}
    read = tuple(name for name, is_read in optional.items() if is_read)
    return ("tokens", "response_mask", "values", "returns", *read)


class Critic(Learner):
    prefix = "critic"

    @property
    def report_names(self) -> tuple[str, ...]:
        return ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")

    def _load(self) -> nn.Module:
        return load_value_model(self.spec.model, self.device)

    @remote(reads=("tokens", "response_mask"), writes=("values",))
    def values(self, rows: Columns) -> dict[str, Tensor]:
        (result,) = self.per_token(rows, lambda micro: (self.model(micro),))
        return {"values": result}

    @remote(reads=_update_columns)
    def update(
        self,
        rows: Columns,
        *,
        step: int,
        num_mini_batches: int = 1,
        sizes: Sequence[int] | None = None,
    ) -> Metrics:
        """As the actor's: one optimizer step per mini-batch and epoch."""
        return self.train(rows, step=step, sizes=sizes or even_sizes(rows, num_mini_batches))

    def _idle_loss(self, micro: MicroBatch) -> Tensor:
        return self.model(micro).sum() * 0.0

    def _selection(self, rows: Rows) -> Selection:
        keep = rows.response["loss_mask" if self.spec.value_loss.has_loss_mask else "response_mask"]
        counts = rows.count(keep)
        return Selection(keep, counts, counts > 0, rows.row.get("session_weight", torch.ones(len(rows))))

    def _loss(self, rows: Rows, micro: MicroBatch, whole: Normalisers) -> Loss:
        spec = self.spec.value_loss
        tokens = self.tokens(rows, micro)
        values = self.model(micro)
        losses = value_loss(values, tokens.column("values"), tokens.column("returns"), tokens.mask, clip=spec.clip)
        total = aggregate(
            losses.losses,
            tokens.mask,
            tokens.lengths,
            spec.aggregate,
            whole,
            horizon=spec.horizon,
            session_weights=tokens.session_weights,
        )
        return Loss(total, {"critic/vf_loss": total}, losses.sums)
