"""Compares after a weight sync what engine and trainer compute. The rollout worker calls it.

That the engine has the very weights is shown by checksums (`identity`); kernels and types still round differently,
so that the difference is a metric, and an error only if no rounding explains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tqppo.errors import EngineError
from tqppo.protocols import RolloutEngine


@dataclass(frozen=True, slots=True)
class Probe:
    """A sequence and the trainer's log-probabilities for it: `logprobs[i]` is that of token i + 1."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float


async def verify_logprobs(engine: RolloutEngine, probe: Probe) -> float:
    """Return the largest difference of log-probabilities; raise EngineError if it is beyond the tolerance.

    A server that has the right weights may still run with an old output layer or old caches.
    """
    num_tokens = len(probe.tokens)
    if len(probe.logprobs) not in (num_tokens, num_tokens - 1):
        raise EngineError(
            f"{num_tokens} tokens need {num_tokens - 1} log-probabilities to compare, not {len(probe.logprobs)}"
        )
    scores = (await engine.score(probe.tokens)).logprobs[: num_tokens - 1]
    deltas = np.abs(np.asarray(scores, np.float64) - np.asarray(probe.logprobs, np.float64)[: num_tokens - 1])
    worst = float(deltas.max()) if len(deltas) else 0.0
    if not worst <= probe.tolerance or math.isnan(worst):
        raise EngineError(
            f"after the weight sync the engine's log-probabilities are up to {worst:.3g} away from the trainer's "
            f"(at token {int(deltas.argmax()) + 1} of {num_tokens}; rounding explains {probe.tolerance:g} at most): it "
            "does not run the new weights. `tqppo doctor logprobs` shows more; rollout.verify_weights = false turns "
            "the check off"
        )
    return worst
