from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    Qwen3Config,
)

from tqppo.algorithms.layout import to_nested
from tqppo.workers.compute import shared_prompts
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.microbatch import FlatRows, MicroBatchCut, build, cuts
from tqppo.workers.compute.model import PolicyModel

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}

groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=6)), min_size=1, max_size=5
)


def rows_in_groups(spec: list[tuple[int, list[int]]], seed: int = 0) -> dict[str, Any]:
    """(prompt length, response lengths) of each group; the rows of a group begin with one prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows, lengths = [], []
    for prompt_length, responses in spec:
        prompt = torch.randint(0, 64, (prompt_length,), generator=generator)
        for length in responses:
            rows.append(torch.cat([prompt, torch.randint(0, 64, (length,), generator=generator)]))
            lengths.append(length)
    total, counts = sum(lengths), torch.tensor(lengths)
    return {
        "tokens": to_nested(torch.cat(rows), torch.tensor([len(row) for row in rows])),
        "response_mask": to_nested(torch.rand(total, generator=generator) > 0.1, counts),
        "old_logprobs": to_nested(torch.full((total,), -4.0), counts),
        "advantages": to_nested(torch.randn(total, generator=generator), counts),
    }


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16)))


def scored(
    policy: PolicyModel, flat: FlatRows, found: list[MicroBatchCut]
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Log-probabilities of all response tokens, gradients of a weighted sum of them, positions computed."""
    policy.zero_grad()
    results, positions = torch.zeros(int(flat.response_lengths.sum())), 0
    for cut in found:
        micro = build(flat, cut)
        logprobs, _, _ = policy(micro, Scoring(1.0))
        (logprobs * flat.response["advantages"][micro.places]).sum().backward()
        results[micro.places] = logprobs.detach()
        positions += micro.input_ids.numel()
    return results, [p.grad.clone() for p in policy.parameters() if p.grad is not None], positions


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(groups=groups, budget=st.sampled_from([8, 40, 10_000]), pairs=st.sampled_from([1, 8, 10_000]))
def test_bundles_give_the_log_probabilities_and_gradients_of_separate_rows(
    policy: PolicyModel, groups: list[tuple[int, list[int]]], budget: int, pairs: int
) -> None:
    flat = FlatRows.of(rows_in_groups(groups))
    chosen = torch.arange(len(flat))
    together = scored(policy, flat, cuts(flat, chosen, budget, attention_pairs_per_token=pairs, overhead=1))
    apart = scored(policy, flat, [MicroBatchCut.apart(chosen)])
    torch.testing.assert_close(together[0], apart[0], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(together[1], apart[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@given(groups=groups, pairs=st.sampled_from([0, 1, 100, 10_000]), budget=st.integers(1, 200))
def test_every_row_is_in_one_bundle_with_rows_of_its_own_prompt(
    groups: list[tuple[int, list[int]]], pairs: int, budget: int
) -> None:
    flat = FlatRows.of(rows_in_groups(groups))
    found = cuts(flat, torch.arange(len(flat)), budget, attention_pairs_per_token=pairs, overhead=1)
    assert sorted(torch.cat([cut.rows for cut in found]).tolist()) == list(range(len(flat)))
    for cut in found:
        assert cut.bundle.tolist() == sorted(cut.bundle.tolist())
        prompts: dict[int, set[tuple[int, ...]]] = {}
        for row, bundle in zip(cut.rows.tolist(), cut.bundle.tolist(), strict=True):
            start = int(flat.starts[row])
            prompt = flat.tokens[start : start + int(flat.lengths[row] - flat.response_lengths[row])]
            prompts.setdefault(bundle, set()).add(tuple(prompt.tolist()))
        assert all(len(each) == 1 for each in prompts.values())


def test_a_group_shares_its_prompt_and_other_prompts_of_that_length_stay_apart(policy: PolicyModel) -> None:
    flat = FlatRows.of(rows_in_groups([(8, [3, 3, 3, 3]), (8, [3, 3, 3, 3])]))
    (cut,) = cuts(flat, torch.arange(8), 10_000, attention_pairs_per_token=10_000, overhead=256)
    assert cut.bundle.tolist() == [0] * 4 + [1] * 4
    micro = build(flat, cut)
    assert micro.input_ids.shape == (2, 8 + 4 * 2)
    assert micro.position_ids is not None
    assert micro.position_ids[0].tolist() == [*range(8), 8, 9, 8, 9, 8, 9, 8, 9]


def test_long_responses_are_not_worth_a_wide_bundle() -> None:
    flat = FlatRows.of(rows_in_groups([(8, [300] * 8)]))
    (cut,) = cuts(flat, torch.arange(8), 10_000, attention_pairs_per_token=384, overhead=256)
    assert cut.bundle.tolist() == list(range(8))
    some = FlatRows.of(rows_in_groups([(150, [120] * 8)]))
    (cut,) = cuts(some, torch.arange(8), 10_000, attention_pairs_per_token=384, overhead=256)
    assert cut.bundle.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # wider ones would look at more than they save


@pytest.mark.parametrize(
    ("config", "is_shared"),
    [
        (LlamaConfig(**SIZES), True),
        (Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16), True),
        (MistralConfig(**SIZES, sliding_window=4), False),
        (Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1, head_dim=16), False),
        (BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64), False),
    ],
    ids=["llama", "qwen", "windowed", "windowed in part", "positions by distance"],
)
def test_only_models_that_attend_to_all_positions_share_prompts(config: Any, is_shared: bool) -> None:
    model = AutoModelForCausalLM.from_config(config)
    assert shared_prompts.attention_pairs_per_token(model, torch.device("cpu")) == (6 * 32 if is_shared else 0)


def test_a_model_that_ignores_the_mask_shares_no_prompts() -> None:
    class MaskBlind(LlamaModel):
        def forward(self, *, attention_mask: Any = None, **inputs: Any) -> Any:
            return super().forward(**inputs)

    class BlindForCausalLM(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model = MaskBlind(config)

    model = BlindForCausalLM(LlamaConfig(**SIZES))
    assert shared_prompts.attention_pairs_per_token(model, torch.device("cpu")) == 0


def test_prompts_are_not_shared_on_a_gpu(tiny_model: Path) -> None:
    model = AutoModel.from_pretrained(tiny_model)
    assert shared_prompts.attention_pairs_per_token(model, torch.device("cpu")) > 0
    assert shared_prompts.attention_pairs_per_token(model, torch.device("cuda")) == 0
