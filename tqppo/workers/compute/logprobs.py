"""What a policy says of tokens, from hidden states: log-probabilities and entropies, in chunks of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tqppo.algorithms.chunks import PerToken, in_chunks

CHUNK_ELEMENTS = 2**26  # most logits of one chunk: 256 MB in float32

Head = Callable[[Tensor], Tensor]
TokenScores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, Σ p² over the vocabulary


class Measure(Protocol):
    """What to compute from the logits of each token."""

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Further tensors [N, …] that it needs, cut into the same chunks."""
        ...

    def __call__(self, logits: Tensor, targets: Tensor, *columns: Tensor) -> PerToken:
        """Results [n] for logits [n, V] in float32 and the tokens [n] that follow."""
        ...


def measure_tokens(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    measure: Measure,
    columns: tuple[Tensor, ...] | None = None,
    *,
    vocabulary: int,
) -> PerToken:
    """Apply the output layer and `measure` to hidden [N, H] and targets [N], with at most `CHUNK_ELEMENTS` logits.

    `columns` are the entries of the measure's columns that are about these tokens; None: all of them are.
    """

    def compute(part: Tensor, wanted: Tensor, *columns: Tensor) -> PerToken:
        return measure(head(part).float(), wanted, *columns)

    return in_chunks(
        compute,
        (hidden, targets, *(measure.columns if columns is None else columns)),
        max(1, CHUNK_ELEMENTS // vocabulary),
    )


@dataclass(frozen=True, slots=True)
class Scoring:
    """Measures the sampled tokens under the policy at a temperature."""

    temperature: float
    with_entropy: bool = False
    with_sum_squares: bool = False

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, logits: Tensor, targets: Tensor, *columns: Tensor) -> TokenScores:
        """Log-probabilities [n] and, if asked for, entropies [n] and Σ p² [n]."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        normaliser = logits.logsumexp(-1)  # [n]
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        entropy = sum_squares = None
        if self.with_entropy:
            entropy = normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)
        if self.with_sum_squares:
            sum_squares = (2.0 * (logits - normaliser[:, None])).exp().sum(-1)
        return logprobs, entropy, sum_squares
