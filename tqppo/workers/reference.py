"""The frozen policy that KL is measured against."""

from __future__ import annotations

from torch import Tensor, nn

from tqppo.workers.compute.model import load_policy
from tqppo.workers.compute.worker import Worker
from tqppo.workers.process.bridge import Columns, remote


class Reference(Worker):
    def _load(self) -> nn.Module:
        return load_policy(self.spec.model, self.device).requires_grad_(False)

    @remote(reads=("tokens", "response_mask"), writes=("ref_logprobs",))
    def logprobs(self, rows: Columns) -> dict[str, Tensor]:
        (result,) = self.per_token(rows, lambda micro: self.model(micro, self.spec.temperature, False))
        return {"ref_logprobs": result}
