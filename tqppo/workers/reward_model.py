"""A sequence-classification model that scores whole trajectories, as a stage of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from tqppo import dataflow
from tqppo.workers.compute.microbatch import FlatRows, last_positions
from tqppo.workers.compute.model import RoleModel, load_score_model
from tqppo.workers.compute.worker import Worker, idle_micro_batch
from tqppo.workers.process.bridge import Columns, implements


class RewardModel(Worker):
    shares_prompts = False

    def _load(self) -> RoleModel:
        return load_score_model(self.spec.model, self.device).requires_grad_(False)

    @implements(dataflow.SCORE)
    @torch.no_grad()
    def score(self, rows: Columns) -> dict[str, Tensor]:
        """One number per trajectory [B], 0 for padding: the model's output at the last token."""
        flat = FlatRows.of(rows)
        real = flat.count(flat.response["response_mask"]) > 0
        scores = torch.zeros(len(flat))
        for cut in self.in_step(self.micro_batches(flat, real.nonzero().squeeze(-1))):
            if cut is None:
                self.model(idle_micro_batch(self.device))
                continue
            micro = last_positions(flat, cut.rows, layout=self.layout).to(self.device)
            scores[cut.rows] = self.model(micro).cpu()
        return {"model_score": scores}
