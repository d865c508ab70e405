"""The contract of `score` and `score_many`: alignment, start rows, top-k, hidden states, and equal bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tqppo.contracts.rollout_subject import MAX_CONTEXT, Subject, prompts, request
from tqppo.errors import EngineError
from tqppo.protocols import Completion, Scores


def can_score(subject: Subject, *, hidden: bool = False) -> bool:
    """Whether the engine scores; one that does not must say so when it is asked."""
    capabilities = subject.engine.capabilities
    if capabilities.score_top_k and (capabilities.score_hidden or not hidden):
        return True
    with pytest.raises(EngineError):
        subject.score([1, 2, 3], hidden=hidden)
    return False


def assert_scores(
    subject: Subject, tokens: Sequence[int], scores: Scores, top_k: int, tolerance: float, *, start: int = 0
) -> None:
    """Rows from `start` on are those of a plain forward; all others are 0."""
    length = len(tokens)
    assert scores.logprobs.shape == (length,)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (length, top_k)
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == np.dtype("float32")
    assert scores.top_ids.dtype == np.dtype("int32")
    expected = subject.logits(tokens).log_softmax(-1)[start:-1]
    asked = slice(start, length - 1)
    chosen = expected.gather(1, torch.tensor(tokens[start + 1 :])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(scores.logprobs[asked], chosen, atol=tolerance)
    np.testing.assert_allclose(scores.top_logprobs[asked], expected.topk(top_k).values.numpy(), atol=tolerance)
    own = expected.gather(1, torch.tensor(scores.top_ids[asked], dtype=torch.int64)).numpy()
    np.testing.assert_allclose(own, scores.top_logprobs[asked], atol=tolerance)
    for rows in (scores.logprobs, scores.top_ids, scores.top_logprobs):
        assert not rows[:start].any()
        assert not rows[-1].any()


def test_scores_are_those_of_a_plain_forward(subject: Subject, tolerance: float) -> None:
    if not can_score(subject):
        return
    sequences = prompts(10, longest=40, seed=5)
    for top_k in (0, 1, min(5, subject.engine.capabilities.score_top_k)):
        for tokens, scores in zip(sequences, subject.score(*sequences, top_k=top_k), strict=True):
            assert_scores(subject, tokens, scores, top_k, tolerance)


def test_scores_begin_at_the_start_row_of_each_sequence(subject: Subject, tolerance: float) -> None:
    if not can_score(subject):
        return
    sequences = prompts(8, longest=40, seed=6)
    starts = [i % len(tokens) for i, tokens in enumerate(sequences)]
    starts[-1] = len(sequences[-1]) - 1  # only the last row, which is 0
    for _ in range(2):  # the second time a server may have the sequences in its prefix cache
        found = subject.score(*sequences, top_k=3, starts=starts)
        for tokens, start, scores in zip(sequences, starts, found, strict=True):
            assert_scores(subject, tokens, scores, 3, tolerance, start=start)


def test_top_tokens_come_likeliest_first_and_need_not_hold_the_chosen_one(subject: Subject, tolerance: float) -> None:
    if not can_score(subject):
        return
    tokens = prompts(1, longest=30, seed=7)[0]
    tokens += subject.logits(tokens)[-1].argsort()[:2].tolist()  # the least likely token is far beyond the top
    for top_k in (1, min(64, subject.engine.capabilities.score_top_k)):
        scores = subject.score(tokens, top_k=top_k)[0]
        assert_scores(subject, tokens, scores, top_k, tolerance)
        assert (np.diff(scores.top_logprobs[:-1], axis=1) <= 0).all()
        assert all(len(set(row)) == top_k for row in scores.top_ids[:-1].tolist())
        row = len(tokens) - 3
        assert tokens[row + 1] not in scores.top_ids[row]
        assert scores.logprobs[row] < scores.top_logprobs[row].min()


def test_one_token_has_no_scores(subject: Subject) -> None:
    if not can_score(subject):
        return
    scores = subject.score([65], top_k=4)[0]
    assert scores.logprobs.tolist() == [0.0]
    assert scores.top_ids.tolist() == [[0, 0, 0, 0]]


def test_sequences_of_the_whole_context_are_scored(subject: Subject, tolerance: float) -> None:
    if not can_score(subject):
        return
    words = prompts(6, longest=40, seed=8)
    sequences = [(word * MAX_CONTEXT)[: MAX_CONTEXT - i] for i, word in enumerate(words)]
    for tokens, scores in zip(sequences, subject.score(*sequences, top_k=2), strict=True):
        assert_scores(subject, tokens, scores, 2, tolerance)


def test_a_sequence_longer_than_the_context_cannot_be_scored(subject: Subject) -> None:
    if not can_score(subject):
        return
    with pytest.raises(EngineError, match=str(MAX_CONTEXT)):
        subject.score([65] * (MAX_CONTEXT + 1))
    with pytest.raises(EngineError, match="start"):
        subject.score([65, 66], starts=[2])
    assert subject.score([65, 66])[0].logprobs[0] < 0, "the engine must still work"


def test_hidden_states_times_the_head_are_the_logits(subject: Subject) -> None:
    if not can_score(subject, hidden=True):
        return
    sequences = prompts(5, longest=40, seed=9)
    head = subject.reference.get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    starts = [len(tokens) // 2 for tokens in sequences]
    for tokens, start, scores in zip(
        sequences, starts, subject.score(*sequences, starts=starts, hidden=True), strict=True
    ):
        assert scores.hidden is not None
        assert scores.hidden.dtype == np.dtype("float32")
        assert len(scores.hidden) == len(tokens)
        logits = torch.from_numpy(scores.hidden) @ head.T
        torch.testing.assert_close(logits[start:-1], subject.logits(tokens)[start:-1], atol=1e-4, rtol=0)
        assert not scores.hidden[:start].any()
        assert not scores.hidden[-1].any()


def test_scores_of_a_deterministic_engine_are_the_same_bytes_whatever_else_it_computes(subject: Subject) -> None:
    """Engines that are not deterministic may differ in the last bits."""
    if not can_score(subject):
        return
    sequences = prompts(12, longest=50, seed=10)
    starts = [len(tokens) // 3 for tokens in sequences]
    engine = subject.engine
    others = [request(p, seed=i, max_new_tokens=8) for i, p in enumerate(prompts(6, seed=11))]

    async def work() -> tuple[list[Scores], list[Completion]]:
        generating = [asyncio.ensure_future(engine.generate(each)) for each in others]
        scoring = asyncio.ensure_future(engine.score_many(prompts(5, seed=12), 2))
        await asyncio.sleep(0)
        found = await engine.score_many(sequences, 4, starts=starts)
        await scoring
        return found, await asyncio.gather(*generating)

    alone = subject.score(*sequences, top_k=4, starts=starts)
    busy, _ = subject.run(work())
    for one, other in zip(alone, busy, strict=True):
        if engine.capabilities.deterministic:
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
            assert one.top_ids.tobytes() == other.top_ids.tobytes()
            assert one.top_logprobs.tobytes() == other.top_logprobs.tobytes()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
