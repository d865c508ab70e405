"""Bundles: several rows with one prompt as one row of a forward, the prompt once, followed by their responses.

Each response sees the prompt and itself, at the positions that it has in a row of its own, so the results are those of
separate rows. This pays while attention, whose cost grows with the square of a row's width, costs less than is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tqppo.workers.compute import architecture

MAX_SHARING = 64  # responses behind one prompt
PAIRS_PER_WIDTH = 6  # a token's linear layers cost as much as 6 · (hidden size) pairs of attention


def assign_bundles(
    tokens: Tensor, starts: Tensor, prompts: Tensor, responses: Tensor, *, attention_pairs_per_token: int
) -> Tensor:
    """The bundle of each row [b], numbered in the order of the rows.

    Neighbours with the same prompt share a bundle where that is cheaper. `starts` index the rows' first tokens;
    `prompts` and `responses` count their positions before and in the response.
    """
    row = torch.arange(len(starts))
    if attention_pairs_per_token == 0:
        return row
    group = (~_repeats_prompt(tokens, starts, prompts)).cumsum(0) - 1
    size = torch.bincount(group)
    first = size.cumsum(0) - size
    in_responses = torch.zeros(len(size)).index_add_(0, group, responses.float())
    per_bundle = _responses_per_bundle(prompts[first].float(), in_responses, size, attention_pairs_per_token)
    num_bundles = torch.ceil(size / per_bundle).long()  # of each group
    return (num_bundles.cumsum(0) - num_bundles)[group] + (row - first[group]) * num_bundles[group] // size[group]


def _repeats_prompt(tokens: Tensor, starts: Tensor, prompts: Tensor) -> Tensor:
    """Whether a row has the same prompt as the row before it: [b] bool."""
    is_same = torch.zeros(len(starts), dtype=torch.bool)
    is_same[1:] = prompts[1:] == prompts[:-1]
    (later,) = is_same.nonzero(as_tuple=True)
    pair, within = spans(prompts[later])
    differs = tokens[starts[later][pair] + within] != tokens[starts[later - 1][pair] + within]
    is_same[later[pair[differs]]] = False
    return is_same


def _responses_per_bundle(prompt: Tensor, in_responses: Tensor, size: Tensor, attention_pairs_per_token: int) -> Tensor:
    """The cheapest number of responses per bundle for each group, among 1, 2, 4, …

    `prompt` and `in_responses` are the positions of the group's prompt and of all its responses.
    """
    candidates = torch.tensor([2**i for i in range(MAX_SHARING.bit_length())])
    candidates = torch.minimum(candidates[:, None], size[None, :])  # [candidates, groups]
    bundles = torch.ceil(size / candidates)
    width = prompt + in_responses / bundles
    cost = bundles * width * (1 + width / attention_pairs_per_token)
    return candidates.gather(0, cost.argmin(0, keepdim=True)).squeeze(0)


def spans(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths [b] of consecutive spans → for each of the Σ elements its span, and its index within it."""
    which = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return which, torch.arange(len(which)) - (lengths.cumsum(0) - lengths)[which]


@dataclass(frozen=True, slots=True)
class BundledRows:
    """Bundles as rows of a model's input. Without shared prompts the model needs only the tokens."""

    tokens: Tensor  # [n, T]
    begin: Tensor  # [b] where in its bundle a row's response begins
    response: Tensor | None  # [n, T] 0 in the prompt, then the number of the response: 1, 2, …
    positions: Tensor | None  # [n, T] position ids: each response continues from the prompt


def lay_out(
    tokens: Tensor, starts: Tensor, bundle: Tensor, prompts: Tensor, responses: Tensor, width: int = 0
) -> BundledRows:
    """Write rows [b] into their bundles, each at least `width` wide."""
    is_first = torch.ones_like(bundle, dtype=torch.bool)
    is_first[1:] = bundle[1:] != bundle[:-1]
    (first,) = is_first.nonzero(as_tuple=True)  # [n] the row whose prompt is written
    before = responses.cumsum(0) - responses
    begin = prompts + before - before[first][bundle]
    wide = max(width, int((begin + responses).max()))
    filled = torch.zeros(len(first) * wide, dtype=tokens.dtype)
    number, within = spans(prompts[first])
    filled[number * wide + within] = tokens[starts[first][number] + within]
    row, within = spans(responses)
    places = (bundle * wide + begin)[row] + within
    filled[places] = tokens[(starts + prompts)[row] + within]
    if len(first) == len(bundle):
        return BundledRows(filled.view(-1, wide), begin, None, None)
    response = torch.zeros(len(filled), dtype=torch.int64)
    response[places] = (torch.arange(1, len(bundle) + 1) - first[bundle])[row]
    positions = torch.arange(wide).repeat(len(first))
    positions[places] = prompts[row] + within
    return BundledRows(filled.view(-1, wide), begin, response.view(-1, wide), positions.view(-1, wide))


def attention_mask(response: Tensor) -> Tensor:
    """Response numbers [n, T] (0: prompt) → [n, 1, T, T] bool: which positions each position attends to."""
    sees = (response[:, None, :] == 0) | (response[:, None, :] == response[:, :, None])
    return sees.tril_()[:, None]


def attention_pairs_per_token(model: nn.Module, device: torch.device) -> int:
    """Number of attention pairs that cost as much as one token's linear layers; 0 where rows are not to be bundled.

    On a GPU the mask of a bundle would take attention from its fast kernel to one that is many times slower.
    """
    transformer = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config = transformer.config.get_text_config()
    if device.type != "cpu" or architecture.attention_kinds(config) != {"full_attention"}:
        return 0
    is_same = _same_when_bundled(architecture.clone(transformer).base_model)
    return PAIRS_PER_WIDTH * int(config.hidden_size) if is_same else 0


@torch.no_grad()
def _same_when_bundled(backbone: nn.Module) -> bool:
    """Whether two responses behind one prompt get the hidden states that they get as separate rows."""
    rows = torch.tensor([[1, 2, 0, 3, 2], [1, 2, 0, 2, 1]])
    prompts, responses = torch.tensor([3, 3]), torch.tensor([2, 2])
    bundled = lay_out(rows.flatten(), torch.tensor([0, 5]), torch.tensor([0, 0]), prompts, responses)
    assert bundled.response is not None, "two rows share one bundle"
    assert bundled.positions is not None, "two rows share one bundle"
    apart = _hidden_states(backbone, input_ids=rows)
    expected = torch.cat([apart[0], apart[1, 3:]])
    mask = attention_mask(bundled.response)
    try:
        together = _hidden_states(
            backbone, input_ids=bundled.tokens, position_ids=bundled.positions, attention_mask=mask
        )
    except (TypeError, ValueError, RuntimeError):  # the model takes no position ids, or no such mask
        return False
    return torch.allclose(together[0], expected, rtol=1e-3, atol=1e-4)


def _hidden_states(backbone: nn.Module, **inputs: Tensor) -> Tensor:
    device = next(backbone.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    states: Tensor = backbone(**moved, use_cache=False).last_hidden_state
    return states.float()
