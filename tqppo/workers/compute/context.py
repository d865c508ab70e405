"""Context parallelism: several ranks compute one row together, each a share of its positions.

Every rank of such a group builds the same micro-batch and takes every n-th position of it, so that prompt and response
are shared out evenly. Only attention needs the others: positions are exchanged for heads there, and back (all-to-all,
as in DeepSpeed's Ulysses). What the loss sees are the results of all positions, the same on every rank of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tqppo.errors import PreflightError
from tqppo.workers.compute import architecture
from tqppo.workers.compute.microbatch import MicroBatch
from tqppo.workers.process.ranks import Ranks

KERNEL = "tqppo_context"  # the name of its attention; `transformers` makes no mask for one that it does not know


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share a row, and this one's place among them."""

    group: dist.ProcessGroup
    size: int
    place: int

    @staticmethod
    def join(ranks: Ranks) -> ContextGroup | None:
        """Form the groups of ranks, and register their attention; None if each rank computes whole rows."""
        if ranks.context == 1:
            return None
        mine = None
        for first in range(0, ranks.size, ranks.context):  # every rank takes part in making every group
            made = dist.new_group(list(range(first, first + ranks.context)))
            mine = made if first <= ranks.rank < first + ranks.context else mine
        assert isinstance(mine, dist.ProcessGroup), "each rank is in one of the groups"
        context = ContextGroup(mine, ranks.context, ranks.place)
        ALL_ATTENTION_FUNCTIONS.register(KERNEL, context.attention())
        return context

    def attention(self) -> Callable[..., tuple[Tensor, None]]:
        """Causal attention over all positions, for this rank's heads: as `transformers` calls it, [b, heads, t, d]."""

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
        ) -> tuple[Tensor, None]:
            assert mask is None, "rows are padded on their right, where a causal model never looks"
            if key.shape[1] % self.size:  # fewer key-value heads than ranks: each gets those of its queries
                repeats = query.shape[1] // key.shape[1]
                key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
            query, key, value = (self._to_heads(each) for each in (query, key, value))
            found = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=options.get("scaling"),
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return self._to_positions(found).transpose(1, 2).contiguous(), None

        return attend

    def _to_heads(self, tensor: Tensor) -> Tensor:
        """All heads of this rank's positions [b, h, t, d] → some heads of all positions [b, h/size, t · size, d]."""
        b, h, t, d = tensor.shape
        parts = tensor.view(b, self.size, h // self.size, t, d).transpose(0, 1)
        return self._exchange(parts).permute(1, 2, 3, 0, 4).reshape(b, h // self.size, t * self.size, d)

    def _to_positions(self, tensor: Tensor) -> Tensor:
        """The opposite of `_to_heads`."""
        b, h, t, d = tensor.shape
        parts = tensor.view(b, h, t // self.size, self.size, d).permute(3, 0, 1, 2, 4)
        return self._exchange(parts).transpose(0, 1).reshape(b, h * self.size, t // self.size, d)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of [size, …] goes to rank i; returns what every rank had for this one."""
        return cast(Tensor, _Exchange.apply(parts, self.group))  # type: ignore[no-untyped-call]

    def check(self, model: PreTrainedModel, device: torch.device) -> None:
        """Refuse a model that cannot be shared, or computes something else when it is."""
        config, name = model.config.get_text_config(), type(model).__name__
        if config.num_attention_heads % self.size:
            heads = config.num_attention_heads
            raise PreflightError(
                f"context_parallel = {self.size} does not divide the {heads} attention heads of {name}"
            )
        kinds = architecture.attention_kinds(config)
        if kinds != {"full_attention"} or not self._is_same(model, device):
            raise PreflightError(
                f"context_parallel = {self.size}: {name} cannot share rows between ranks "
                f"({'its results differ' if kinds == {'full_attention'} else ', '.join(sorted(kinds))})"
            )

    @torch.no_grad()
    def _is_same(self, model: PreTrainedModel, device: torch.device) -> bool:
        tokens = torch.arange(2 * 3 * self.size, device=device).view(2, -1) % architecture.VOCABULARY
        alone: Any = architecture.clone(model).base_model.to(device)
        shared: Any = architecture.clone(model).base_model.to(device)
        shared.set_attn_implementation(KERNEL)
        expected: Tensor = alone(input_ids=tokens, use_cache=False).last_hidden_state
        places = torch.arange(self.place, tokens.shape[1], self.size, device=device)
        found: Tensor = shared(
            input_ids=tokens[:, places], position_ids=places.expand(2, -1), use_cache=False
        ).last_hidden_state
        return torch.allclose(found, expected[:, places], rtol=1e-3, atol=1e-4)

    def share(self, micro: MicroBatch) -> Share:
        """This rank's positions of a micro-batch, and the outputs at them."""
        n, width = micro.input_ids.shape
        assert micro.position_ids is None or width == 1, "rows are apart and begin at position 0"
        tokens = functional.pad(micro.input_ids, (0, -width % self.size))
        places = torch.arange(self.place, tokens.shape[1], self.size, device=tokens.device)
        at = micro.outputs % width
        (chosen,) = (at % self.size == self.place).nonzero(as_tuple=True)
        outputs = micro.outputs[chosen] // width * len(places) + at[chosen] // self.size
        own = replace(
            micro,
            input_ids=tokens[:, places],
            position_ids=places.expand(n, -1),
            outputs=outputs,
            targets=micro.targets[chosen],
        )
        return Share(own, chosen, len(micro.outputs), self)

    def joined(self, own: Tensor, chosen: Tensor, count: int) -> Tensor:
        """The results [count, …] of all ranks, of which `own` are those at `chosen`."""
        return cast(Tensor, _Join.apply(own, chosen, count, self.group))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a micro-batch. Without a context it is the whole."""

    micro: MicroBatch
    chosen: Tensor | None = None  # [n] which of the micro-batch's outputs are this rank's; None: all
    count: int = 0
    context: ContextGroup | None = None

    def columns(self, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The entries of these columns [N, …] that are about this rank's outputs."""
        return whole if self.chosen is None else tuple(column[self.chosen] for column in whole)

    def whole(self, result: Tensor | None) -> Tensor | None:
        """A result of this rank's outputs as one of all."""
        if self.context is None or self.chosen is None or result is None:
            return result
        return self.context.joined(result, self.chosen, self.count)


def share(micro: MicroBatch, context: ContextGroup | None) -> Share:
    return Share(micro) if context is None else context.share(micro)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts, which is its own opposite."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None  # type: ignore[attr-defined]


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


class _Join(torch.autograd.Function):
    """Puts the ranks' results together. Each computes the same loss, and takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, own: Tensor, chosen: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(chosen)
        whole = own.new_zeros(count, *own.shape[1:])
        whole[chosen] = own
        dist.all_reduce(whole, group=group)  # every entry but one is 0: exact
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (chosen,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0][chosen], None, None, None
