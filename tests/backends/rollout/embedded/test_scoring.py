"""Scores of the embedded engine beyond the contract: how a batch is cut, and what must not change its results."""

from __future__ import annotations

import asyncio
import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tqppo import plugins
from tqppo.errors import EngineError
from tqppo.protocols import EngineSpec, Scores
from tqppo.tiny.model import write_tiny_model

forward: Any = importlib.import_module("tqppo_backends.rollout.embedded.forward")
scoring: Any = importlib.import_module("tqppo_backends.rollout.embedded.scoring")
SCALED: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
}


def batch(count: int, *, vocabulary: int = 256, longest: int = 40, top_k: int = 3, hidden: bool = False) -> Any:
    rng = random.Random(count)
    tokens = [tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(2, longest))) for _ in range(count)]
    return scoring.ScoreBatch(tokens, [rng.randrange(len(each)) for each in tokens], top_k, hidden)


def load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def as_bytes(scores: Scores) -> list[bytes]:
    return [scores.logprobs.tobytes(), scores.top_ids.tobytes(), scores.top_logprobs.tobytes()]


def assert_exact(model: Any, asked: Any, found: list[Scores]) -> None:
    for tokens, start, scores in zip(asked.tokens, asked.starts, found, strict=True):
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[start:-1]
        chosen = logprobs[range(len(tokens) - 1 - start), list(tokens[start + 1 :])]
        np.testing.assert_allclose(scores.logprobs[start:-1], chosen, atol=1e-5)
        np.testing.assert_allclose(scores.top_logprobs[start:-1], logprobs.topk(asked.top_k).values, atol=1e-5)


@pytest.mark.parametrize("family", SCALED)
def test_logits_that_an_architecture_changes_after_its_head_are_scored_as_it_changes_them(
    family: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        family,
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SCALED[family],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    calls = forward.ModelForward(model)
    assert not calls.has_plain_head
    asked = batch(6, vocabulary=40)
    assert_exact(model, asked, scoring.SequenceScorer(calls).score(asked))


def test_small_chunks_of_the_head_and_small_forwards_give_the_same_scores(tiny_model: Path) -> None:
    model = load(tiny_model)
    calls = forward.ModelForward(model)
    assert calls.has_plain_head
    scorer, asked = scoring.SequenceScorer(calls), batch(20)
    sizes: list[int] = []
    with model.get_output_embeddings().register_forward_hook(lambda _, __, out: sizes.append(out.shape[0])):
        scorer._chunk_rows, scorer._max_tokens = 7, 64
        assert_exact(model, asked, scorer.score(asked))
    assert max(sizes) == 7


def test_the_head_is_computed_for_the_rows_that_were_asked_for_only(tiny_model: Path) -> None:
    model = load(tiny_model)
    scorer = scoring.SequenceScorer(forward.ModelForward(model))
    rows: list[int] = []
    with model.get_output_embeddings().register_forward_hook(lambda _, __, out: rows.append(out.shape[:-1].numel())):
        scorer.score(scoring.ScoreBatch([tuple(range(50))], [45], 2, False))
    assert rows == [1, 4]  # the model's own call gets one row; rows 45 to 48 are about tokens 46 to 49


def test_order_and_repeats_do_not_change_the_bytes_of_a_batch(tiny_model: Path) -> None:
    scorer, asked = scoring.SequenceScorer(forward.ModelForward(load(tiny_model))), batch(30)
    first = scorer.score(asked)
    order = [*random.Random(1).sample(range(30), 30), 4, 4, 7]
    shuffled = scoring.ScoreBatch([asked.tokens[i] for i in order], [asked.starts[i] for i in order], 3, False)
    assert [as_bytes(each) for each in scorer.score(shuffled)] == [as_bytes(first[i]) for i in order]


def test_one_sequence_may_be_scored_from_several_rows_in_one_batch(tiny_model: Path) -> None:
    model, tokens = load(tiny_model), tuple(range(20))
    asked = scoring.ScoreBatch([tokens, tokens, tokens], [0, 10, 19], 2, True)
    found = scoring.SequenceScorer(forward.ModelForward(model)).score(asked)
    assert_exact(model, asked, found)
    assert [int((each.logprobs != 0).sum()) for each in found] == [19, 9, 0]
    np.testing.assert_allclose(found[0].hidden[10:], found[1].hidden[10:], atol=1e-6)


async def started(folder: Path) -> Any:
    engine = plugins.load("rollout", "embedded")(EngineSpec(model=str(folder), max_context_tokens=256))
    await engine.start()
    return engine


def test_a_batch_whose_caller_has_gone_is_not_computed(tiny_model: Path) -> None:
    async def work() -> list[int]:
        engine = await started(tiny_model)
        computed: list[int] = []
        score = engine._scorer.score
        engine._scorer.score = lambda asked: computed.append(len(asked.tokens)) or score(asked)
        calls = [asyncio.ensure_future(engine.score_many([[1, 2, 3]] * n)) for n in (1, 2, 3)]
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await engine.close()
        return computed

    assert asyncio.run(work()) == [1, 3]


def test_logits_that_are_not_numbers_are_an_error_and_not_a_score(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path))
    model.get_output_embeddings().weight.data[5] = float("nan")
    scorer = scoring.SequenceScorer(forward.ModelForward(model))
    with pytest.raises(EngineError, match="not finite"):
        scorer.score(batch(3))


def test_what_cannot_be_scored_is_refused_before_it_is_computed(tiny_model: Path) -> None:
    async def work() -> None:
        engine = await started(tiny_model)
        with pytest.raises(EngineError, match="start is 3"):
            await engine.score([1, 2, 3], start=3)
        with pytest.raises(EngineError, match="token ids"):
            await engine.score([1, 10**6])
        with pytest.raises(EngineError, match="top_k is 10000"):
            await engine.score([1, 2], 10_000)
        assert await engine.score_many([]) == []
        await engine.close()

    asyncio.run(work())
