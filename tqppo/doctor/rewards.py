"""Tries a reward on rows of a dataset, for `tqppo reward try`: scores of given answers, or of the references."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqppo.data.prompts import Prompt
from tqppo.rewards.scorer import Scorer, ScorerSpec


@dataclass(frozen=True, slots=True)
class TriedAnswer:
    """An answer to a row's prompt, its score, and how long the function took."""

    where: str
    answer: str
    score: float
    metrics: dict[str, float]
    failure: str
    seconds: float


def try_reward(
    spec: ScorerSpec, prompts: Sequence[tuple[str, Prompt]], answers: Sequence[str] = (), *, references: bool = False
) -> list[TriedAnswer]:
    """Score each of `answers` for every prompt, and with `references` the row's own answer."""
    scorer = Scorer(spec)
    try:
        scorer.warm_up()
        return [
            _try(scorer, where, prompt, answer)
            for where, prompt in prompts
            for answer in [*([str(prompt.answer)] if references else []), *answers]
        ]
    finally:
        scorer.close()


def _try(scorer: Scorer, where: str, prompt: Prompt, answer: str) -> TriedAnswer:
    begun = time.perf_counter()
    transcript = prompt.text + answer
    scored = asyncio.run(
        scorer.score(prompt.source, answer, prompt.answer, prompt.extra, prompt=prompt.question, transcript=transcript)
    )
    seconds = time.perf_counter() - begun
    return TriedAnswer(where, answer, scored.score, scored.metrics, scored.failure, seconds)
