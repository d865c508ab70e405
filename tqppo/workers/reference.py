"""The frozen policy that KL is measured against."""

from __future__ import annotations

from torch import Tensor

from tqppo import dataflow
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.model import RoleModel, load_policy
from tqppo.workers.compute.worker import Worker
from tqppo.workers.process.bridge import Columns, implements


class Reference(Worker):
    def _load(self) -> RoleModel:
        return load_policy(self.spec.model, self.device, is_frozen=True).requires_grad_(False)

    @implements(dataflow.REFERENCE_LOGPROBS)
    def logprobs(self, rows: Columns) -> dict[str, Tensor]:
        (result,) = self.per_token(rows, lambda micro: self.model(micro, Scoring(self.spec.temperature)))
        return {"ref_logprobs": result}
