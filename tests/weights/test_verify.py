"""The check after a weight sync: it passes only if engine and trainer agree on every token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from tqppo.errors import EngineError
from tqppo.protocols import RolloutEngine, Scores
from tqppo.weights.verify import Probe, verify_logprobs


class FixedScores:
    """An engine that gives every sequence the same log-probabilities."""

    def __init__(self, logprobs: Sequence[float]) -> None:
        self.logprobs = np.array([*logprobs, 0.0], np.float32)

    async def score(self, tokens: Sequence[int], top_k: int = 0) -> Scores:
        return Scores(self.logprobs, np.zeros((len(tokens), 0), np.int32), np.zeros((len(tokens), 0), np.float32))


def verify(expected: list[float]) -> float:
    engine = cast(RolloutEngine, FixedScores([-1.0, -2.0]))
    return asyncio.run(verify_logprobs(engine, Probe([1, 2, 3], expected, 1e-4)))


def test_differences_within_the_tolerance_pass() -> None:
    assert verify([-1.0, -2.00001]) < 1e-4
    assert verify([-1.0, -2.0, 0.0]) == 0.0  # a value after the last token is not compared


def test_the_error_names_the_worst_token() -> None:
    with pytest.raises(EngineError, match="token 2 of 3"):
        verify([-1.0, -2.5])


def test_a_value_that_is_not_a_number_fails() -> None:
    with pytest.raises(EngineError, match="does not run the new weights"):
        verify([math.nan, -2.0])


def test_a_probe_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(EngineError, match="need 2 log-probabilities"):
        verify([-1.0])
