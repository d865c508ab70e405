"""The base class of all roles: a device, ranks, a model, and forwards over rows without gradients.

Workers are plain classes: a group creates one per rank inside a Ray actor; tests create and call them directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tqppo.algorithms import balance
from tqppo.queue.client import Queue
from tqppo.workers.compute import microbatch, shared_prompts
from tqppo.workers.compute.context import KERNEL, ContextGroup
from tqppo.workers.compute.loading import attention_kernel, compute_dtype, fill
from tqppo.workers.compute.microbatch import FlatRows, MicroBatch, MicroBatchCut
from tqppo.workers.compute.model import RoleModel, layout_for, shard
from tqppo.workers.compute.residence import Residence
from tqppo.workers.process.ranks import Ranks
from tqppo.workers.specs import RoleSpec

_FORWARD_COST = {"cpu": 256, "cuda": 4096}  # cost of one more forward per rank, in positions


class Worker:
    """One rank of one role. `queue` is needed only when methods are called with batches instead of tensors."""

    model: nn.Module
    queue: Queue
    shares_prompts = True  # rows with the same prompt may share it in a forward

    def __init__(
        self, spec: RoleSpec, *, ranks: Ranks | None = None, queue: Queue | None = None, device: str = "cpu"
    ) -> None:
        self.ranks = ranks or Ranks()
        if self.ranks.context > 1:
            spec = replace(spec, model=replace(spec.model, attention=KERNEL))
        self.spec = spec
        self.features = spec.features
        if queue is not None:
            self.queue = queue
        self.device = torch.device(device)
        self.dtype = compute_dtype(spec.model.dtype, self.device)
        self.residence = Residence(self.device)
        self.layout = layout_for(attention_kernel(spec.model.attention, self.device))

    def start(self) -> None:
        """Load the model; the constructor does nothing that takes time."""
        context = ContextGroup.join(self.ranks)
        model = self._load()
        if context is not None:
            context.check(next(each for each in model.modules() if isinstance(each, PreTrainedModel)), self.device)
            model.context = context
        may_share = self.layout == "trimmed" and self.shares_prompts and context is None
        self.attention_pairs_per_token = (
            shared_prompts.attention_pairs_per_token(model, self.device) if may_share else 0
        )
        self.model = shard(model, self.device, self.dtype, ranks_per_copy=self.spec.ranks_per_copy)
        fill(self.model, self.spec.model.path)

    def _load(self) -> RoleModel:
        raise NotImplementedError

    def device_tensors(self) -> Iterator[Tensor]:
        """Every tensor that stays on the device from one call to the next."""
        yield from self.model.parameters()
        yield from self.model.buffers()

    def rest(self) -> None:
        """Leave the device to another role; nothing may be called before `resume`."""
        self.residence.rest(self.device_tensors())

    def resume(self) -> None:
        self.residence.resume()

    def held_bytes(self) -> int:
        """Bytes on the device between two calls."""
        return self.residence.held_bytes(self.device_tensors())

    def close(self) -> None:
        """Release what `start` took beyond memory; a role without such resources does nothing."""

    def micro_batches(self, rows: FlatRows, chosen: Tensor) -> list[MicroBatchCut]:
        """Cut the chosen rows by the token budget."""
        budget = self.spec.micro_batch_tokens * self.ranks.context
        if self.layout == "packed" and len(chosen):
            widths = (rows.lengths[chosen] - 1).tolist()
            return [MicroBatchCut.apart(chosen[cut]) for cut in balance.micro_batches(widths, max(budget, *widths))]
        overhead = _FORWARD_COST[self.device.type] * self.ranks.size
        pairs = self.attention_pairs_per_token
        return microbatch.cuts(rows, chosen, budget, attention_pairs_per_token=pairs, overhead=overhead)

    def build(self, rows: FlatRows, cut: MicroBatchCut, keep: Tensor | None = None) -> MicroBatch:
        return microbatch.build(rows, cut, layout=self.layout, keep=keep).to(self.device)

    def in_step(self, cuts: list[MicroBatchCut]) -> Iterator[MicroBatchCut | None]:
        """The cuts, then None up to the largest number of cuts on any rank: forwards are collective."""
        most = max(int(numbers[0]) for numbers in self.ranks.gather([len(cuts)]))
        yield from followed_by_none(cuts, most)

    @torch.no_grad()
    def per_token(
        self, columns: Mapping[str, Tensor], forward: Callable[[MicroBatch], tuple[Tensor | None, ...]]
    ) -> list[Tensor]:
        """Run `forward` over all rows; each tensor that it returns becomes a jagged response column."""
        rows = FlatRows.of(columns)
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


def followed_by_none(cuts: list[MicroBatchCut], count: int) -> Iterator[MicroBatchCut | None]:
    """The cuts, then None until there are `count`."""
    yield from cuts
    yield from (None for _ in range(count - len(cuts)))


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """One position without effect, for the forward of a rank that has no rows left while other ranks do."""
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(zero[None], zero[None], None, zero, zero, zero, zero, zero).to(device)


def prepare_process(spec: RoleSpec, device: torch.device) -> None:
    """Set threads, determinism and seed of a process that runs one worker and nothing else."""
    if spec.threads or device.type == "cpu":
        torch.set_num_threads(spec.threads or 1)
    if spec.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling would write every new tensor twice.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 — set by a module property
    torch.manual_seed(spec.seed)
