"""What all roles have in common: a device, ranks, a model without gradients, and forwards over rows.

Workers are plain classes: a group makes one per rank inside a Ray actor, tests make one and call it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tqppo.algorithms import balance
from tqppo.workers.compute import microbatch
from tqppo.workers.compute import shared_prompts as trees
from tqppo.workers.compute.microbatch import Cut, MicroBatch, Rows
from tqppo.workers.compute.model import attention_kernel, compute_dtype, layout_for, shard
from tqppo.workers.process.ranks import Ranks
from tqppo.workers.specs import RoleSpec

_FORWARD_COST = {"cpu": 256, "cuda": 4096}  # what one more forward costs, in positions; more with ranks to wait for


class Worker:
    """One rank of one role. `queue` is needed only when methods are called with batches instead of tensors."""

    model: nn.Module
    has_trees = True  # rows with one prompt may share it in a forward

    def __init__(self, spec: RoleSpec, *, ranks: Ranks | None = None, queue: Any = None, device: str = "cpu") -> None:
        self.spec = spec
        self.features = spec.features
        self.ranks = ranks or Ranks()
        self.queue = queue
        self.device = torch.device(device)
        self.dtype = compute_dtype(spec.model.dtype, self.device)
        self.layout = layout_for(attention_kernel(spec.model.attention, self.device))

    def start(self) -> None:
        """Load the model; the constructor does nothing that takes time."""
        model = self._load()
        self.dear = trees.dear(model) if self.layout == "trimmed" and self.has_trees else 0
        self.model = shard(model, self.device, self.dtype)

    def _load(self) -> nn.Module:
        raise AssertionError("a role says which model it loads")

    def close(self) -> None:
        """Leave nothing behind."""

    def micro_batches(self, rows: Rows, chosen: Tensor) -> list[Cut]:
        """The chosen rows cut by the token budget."""
        budget = self.spec.micro_batch_tokens
        if self.layout == "packed" and len(chosen):
            widths = (rows.lengths[chosen] - 1).tolist()
            return [Cut.apart(chosen[cut]) for cut in balance.micro_batches(widths, max(budget, *widths))]
        overhead = _FORWARD_COST[self.device.type] * self.ranks.size
        return microbatch.cuts(rows, chosen, budget, dear=self.dear, overhead=overhead)

    def build(self, rows: Rows, cut: Cut, keep: Tensor | None = None) -> MicroBatch:
        return microbatch.build(rows, cut, layout=self.layout, keep=keep).to(self.device)

    def in_step(self, cuts: list[Cut]) -> Iterator[Cut | None]:
        """The cuts, then None until every rank has had as many as the neediest one: forwards are collective."""
        neediest = max(int(numbers[0]) for numbers in self.ranks.gather([len(cuts)]))
        yield from followed_by_none(cuts, neediest)

    @torch.no_grad()
    def per_token(self, columns: Any, forward: Callable[[MicroBatch], tuple[Tensor | None, ...]]) -> list[Tensor]:
        """Forward over all rows → response columns [ΣR], one for each tensor that `forward` returns, as jagged."""
        rows = Rows.of(columns)
        cuts = self.micro_batches(rows, torch.arange(len(rows)))
        results: list[Tensor] = []
        for cut in self.in_step(cuts):
            micro = idle_micro_batch(self.device) if cut is None else self.build(rows, cut)
            outputs = [output for output in forward(micro) if output is not None]
            results = results or [torch.zeros(int(rows.response_lengths.sum())) for _ in outputs]
            if cut is not None:
                for result, output in zip(results, outputs, strict=True):
                    result[micro.places] = output.to("cpu", torch.float32)
        return [rows.jagged(result) for result in results]


def followed_by_none(cuts: list[Cut], count: int) -> Iterator[Cut | None]:
    yield from cuts
    yield from (None for _ in range(count - len(cuts)))


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """What a rank without rows puts through the model while the others work: one position, worth nothing."""
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(zero[None], zero[None], None, zero, zero, zero, zero, zero).to(device)


def prepare_process(spec: RoleSpec, device: torch.device) -> None:
    """Threads and determinism, for processes that do nothing else than run one worker."""
    if spec.threads or device.type == "cpu":
        torch.set_num_threads(spec.threads or 1)
    if spec.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # would write every new tensor twice
    torch.manual_seed(spec.seed)
