"""Rows with one prompt as one row of a forward: the prompt once, the responses as branches behind it.

A branch sees the prompt and itself, at the positions that it has in a row of its own, so the results are those of
separate rows. It pays while attention, which grows with the square of a tree's width, costs less than was saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MAX_BRANCHES = 64
PAIRS_PER_WIDTH = 6  # a position costs as much as 6 · (hidden size) pairs of positions in attention


def grow(tokens: Tensor, starts: Tensor, prompts: Tensor, branches: Tensor, *, dear: int) -> Tensor:
    """Number the trees of rows [b] in their order: neighbours with one prompt together, where that is cheaper.

    `prompts` and `branches` are positions before and in the response; `dear`: pairs of attention per position.
    """
    row = torch.arange(len(starts))
    if dear == 0:
        return row
    group = (~_repeats(tokens, starts, prompts)).cumsum(0) - 1
    size = torch.bincount(group)
    first = size.cumsum(0) - size
    wide = torch.zeros(len(size)).index_add_(0, group, branches.float())
    fan = _fan(prompts[first].float(), wide, size, dear)
    count = torch.ceil(size / fan).long()  # trees of a group
    return (count.cumsum(0) - count)[group] + (row - first[group]) * count[group] // size[group]


def _repeats(tokens: Tensor, starts: Tensor, prompts: Tensor) -> Tensor:
    """[b] bool: rows whose prompt is that of the row before them."""
    is_like = torch.zeros(len(starts), dtype=torch.bool)
    is_like[1:] = prompts[1:] == prompts[:-1]
    (later,) = is_like.nonzero(as_tuple=True)
    pair, within = spans(prompts[later])
    differs = tokens[starts[later][pair] + within] != tokens[starts[later - 1][pair] + within]
    is_like[later[pair[differs]]] = False
    return is_like


def _fan(prompt: Tensor, wide: Tensor, size: Tensor, dear: int) -> Tensor:
    """Branches per tree of each group, 1, 2, 4 …: the cheapest by positions and pairs of positions."""
    fans = torch.tensor([2**i for i in range(MAX_BRANCHES.bit_length())])
    fans = torch.minimum(fans[:, None], size[None, :])  # [candidates, groups]
    trees = torch.ceil(size / fans)
    width = prompt + wide / trees
    cost = trees * width * (1 + width / dear)
    return fans.gather(0, cost.argmin(0, keepdim=True)).squeeze(0)


def spans(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """lengths [b] → for each of their Σ elements: which span it is in, and where in it."""
    which = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return which, torch.arange(len(which)) - (lengths.cumsum(0) - lengths)[which]


@dataclass(frozen=True, slots=True)
class Grove:
    """Trees side by side, as a model reads them. Where every tree is a plain row, nothing needs saying of branches."""

    tokens: Tensor  # [n, T]
    begin: Tensor  # [b] where in its tree a row's branch begins
    branch: Tensor | None  # [n, T] 0 in the prompt, then 1, 2 …
    positions: Tensor | None  # [n, T] going on from the prompt in each branch


def plant(tokens: Tensor, starts: Tensor, tree: Tensor, prompts: Tensor, branches: Tensor, width: int = 0) -> Grove:
    """Lay out rows [b] by their trees, at least `width` wide."""
    is_first = torch.ones_like(tree, dtype=torch.bool)
    is_first[1:] = tree[1:] != tree[:-1]
    (root,) = is_first.nonzero(as_tuple=True)  # [n] the row that gives the prompt
    before = branches.cumsum(0) - branches
    begin = prompts + before - before[root][tree]
    wide = max(width, int((begin + branches).max()))
    planted = torch.zeros(len(root) * wide, dtype=tokens.dtype)
    number, within = spans(prompts[root])
    planted[number * wide + within] = tokens[starts[root][number] + within]
    row, within = spans(branches)
    places = (tree * wide + begin)[row] + within
    planted[places] = tokens[(starts + prompts)[row] + within]
    if len(root) == len(tree):
        return Grove(planted.view(-1, wide), begin, None, None)
    branch = torch.zeros(len(planted), dtype=torch.int64)
    branch[places] = (torch.arange(1, len(tree) + 1) - root[tree])[row]
    positions = torch.arange(wide).repeat(len(root))
    positions[places] = prompts[row] + within
    return Grove(planted.view(-1, wide), begin, branch.view(-1, wide), positions.view(-1, wide))


def attention_mask(branch: Tensor) -> Tensor:
    """branch [n, T] (0: prompt) → [n, 1, T, T] bool: what each position sees, itself always."""
    sees = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    return sees.tril_()[:, None]


def dear(model: nn.Module) -> int:
    """How many pairs of positions cost as much as one; 0 if the model does not compute trees as it does rows."""
    transformer: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config = transformer.config.get_text_config()
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [window]
    if set(kinds) != {"full_attention"} or not _agrees(transformer.base_model):
        return 0
    return PAIRS_PER_WIDTH * int(config.hidden_size)


@torch.no_grad()
def _agrees(backbone: Any) -> bool:
    """Whether two branches behind a prompt get the hidden states that they have as rows."""
    rows = torch.tensor([[1, 2, 0, 3, 2], [1, 2, 0, 2, 1]])
    prompts, branches = torch.tensor([3, 3]), torch.tensor([2, 2])
    grove = plant(rows.flatten(), torch.tensor([0, 5]), torch.tensor([0, 0]), prompts, branches)
    assert grove.branch is not None, "two rows in one tree"
    apart = _run(backbone, input_ids=rows)
    expected = torch.cat([apart[0], apart[1, 3:]])
    mask = attention_mask(grove.branch)
    try:
        together = _run(backbone, input_ids=grove.tokens, position_ids=grove.positions, attention_mask=mask)[0]
    except (TypeError, ValueError, RuntimeError):  # no such inputs, as of models whose positions are no input
        return False
    return torch.allclose(together, expected, rtol=1e-3, atol=1e-4)


def _run(backbone: Any, **inputs: Any) -> Tensor:
    device = next(backbone.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    return backbone(**moved, use_cache=False).last_hidden_state.float()
