"""Scores as servers answer them: checked before they are asked for, and read from arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tqppo.errors import EngineError
from tqppo.protocols import EngineSpec, Scores


def check_sequence(spec: EngineSpec, tokens: Sequence[int], start: int) -> None:
    """Raise for a sequence that cannot be scored."""
    if not 0 < len(tokens) <= spec.max_context_tokens:
        raise EngineError(
            f"{len(tokens)} tokens were given; {spec.name} scores 1 to {spec.max_context_tokens} "
            "(rollout.max_context_tokens)"
        )
    if not 0 <= start < len(tokens):
        raise EngineError(f"start is {start}; it may be 0 to {len(tokens) - 1} for {len(tokens)} tokens")


def no_scores(num_tokens: int, top_k: int) -> Scores:
    """Scores to be filled in: all 0."""
    return Scores(
        np.zeros(num_tokens, np.float32),
        np.zeros((num_tokens, top_k), np.int32),
        np.zeros((num_tokens, top_k), np.float32),
    )


def unpacked(content: bytes, num_tokens: int, top_k: int, start: int) -> Scores:
    """Scores from the rows of one sequence: float32 [N], int32 [N, K], float32 [N, K]; N = tokens - 1 - start."""
    scores, num_rows = no_scores(num_tokens, top_k), num_tokens - 1 - start
    if len(content) != 4 * num_rows * (1 + 2 * top_k):
        raise EngineError(f"{len(content)} bytes came for the scores of {num_rows} rows with top-k {top_k}")
    rows = slice(start, num_tokens - 1)
    chosen, ids, tops = np.split(np.frombuffer(content, "<i4"), [num_rows, num_rows * (1 + top_k)])
    scores.logprobs[rows] = chosen.view("<f4")
    scores.top_ids[rows] = ids.reshape(num_rows, top_k)
    scores.top_logprobs[rows] = tops.view("<f4").reshape(num_rows, top_k)
    return scores
