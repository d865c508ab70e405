"""Compares an engine's log-probabilities with the trainer's for the same tokens, and recommends a correction.

Figures only, no torch: `logprobs` obtains the numbers and `tqppo doctor logprobs` prints the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from tqppo.errors import EngineError

NUM_WORST = 8
NEGLIGIBLE_MEAN, NEGLIGIBLE_MAX = 1e-3, 0.1  # of |Δ|: below both, a correction would only add noise
OUTLIER_LOW, OUTLIER_HIGH = 0.5, 5.0  # icepop leaves out ratios outside of these
MANY_OUTLIERS = 1e-4  # share of tokens
USABLE_ESS = 0.7  # smallest effective share of sequences at which whole-sequence weights are worth their variance


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large difference, and the text before it."""

    sequence: int
    position: int
    token: str
    context: str
    engine: float
    trainer: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Figures over all sampled tokens; Δ is trainer − engine, as in the training metrics."""

    num_sequences: int
    num_tokens: int
    mean_abs: float
    max_abs: float
    k1: float  # mean of engine − trainer: estimates KL(engine ‖ trainer), may be negative
    k3: float  # the same, never negative
    pearson: float  # of the probabilities
    ess_token: float  # effective share of the tokens under per-token importance weights
    ess_sequence: float
    outliers: float  # share of tokens whose ratio icepop would leave out
    correction: str
    reason: str
    worst: tuple[WorstToken, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


Pair = tuple[Sequence[float], Sequence[float], Sequence[int]]  # engine's and trainer's log-probabilities, tokens


def compare(
    engine: Sequence[Sequence[float]],
    trainer: Sequence[Sequence[float]],
    *,
    tokens: Sequence[Sequence[int]],
    decode: Callable[[list[int]], str] = str,
) -> Mismatch:
    """Compare per sequence; the arguments hold each sampled token's log-probability on both sides, and the token."""
    pairs = list(zip(engine, trainer, tokens, strict=True))
    if not any(len(sampled) for *_, sampled in pairs):
        raise EngineError("there is nothing to compare: the engine sampled no token")
    deltas = [np.asarray(t, np.float64) - np.asarray(e, np.float64) for e, t, _ in pairs]
    delta, all_engine = np.concatenate(deltas), np.concatenate([np.asarray(e, np.float64) for e in engine])
    all_trainer = np.concatenate([np.asarray(t, np.float64) for t in trainer])
    ratio = np.exp(np.clip(delta, -20, 20))
    figures = {
        "mean_abs": float(np.abs(delta).mean()),
        "max_abs": float(np.abs(delta).max()),
        "ess_sequence": _ess(np.array([each.sum() for each in deltas])),
        "outliers": float(((ratio < OUTLIER_LOW) | (ratio > OUTLIER_HIGH)).mean()),
    }
    correction, reason = advise(**figures)
    return Mismatch(
        num_sequences=len(pairs),
        num_tokens=len(delta),
        k1=float(-delta.mean()),
        k3=float((np.expm1(np.clip(delta, -20, 20)) - delta).mean()),
        pearson=_pearson(np.exp(all_engine), np.exp(all_trainer)),
        ess_token=_ess(delta),
        correction=correction,
        reason=reason,
        worst=_worst(pairs, deltas, decode),
        **figures,
    )


def advise(*, mean_abs: float, max_abs: float, ess_sequence: float, outliers: float) -> tuple[str, str]:
    """The recommended value of `algorithm.correction`, and the reason."""
    if mean_abs <= NEGLIGIBLE_MEAN and max_abs <= NEGLIGIBLE_MAX:
        return "none", f"|Δ| is {mean_abs:.1e} on average and {max_abs:.1e} at most: nothing to correct"
    if outliers >= MANY_OUTLIERS:
        return "icepop", (
            f"{outliers:.2%} of the tokens have a ratio outside [{OUTLIER_LOW}, {OUTLIER_HIGH}]: leave those out"
        )
    if ess_sequence >= USABLE_ESS:
        return "sequence", f"{ess_sequence:.0%} of the sequences count effectively: the unbiased weights are affordable"
    return "token", f"only {ess_sequence:.0%} of the sequences would count effectively: weigh tokens one by one"


def _ess(log_weights: np.ndarray) -> float:
    """Effective sample size as a share of the samples; 1 if all weights are equal."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return 1.0 if np.allclose(a, b) else 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _worst(pairs: list[Pair], deltas: list[np.ndarray], decode: Callable[[list[int]], str]) -> tuple[WorstToken, ...]:
    places = [(abs(float(d)), row, i) for row, each in enumerate(deltas) for i, d in enumerate(each)]
    found = []
    for _, row, i in sorted(places, reverse=True)[:NUM_WORST]:
        engine, trainer, sampled = pairs[row]
        context = decode(list(sampled[max(0, i - 12) : i]))
        found.append(WorstToken(row, i, decode([sampled[i]]), context, float(engine[i]), float(trainer[i])))
    return tuple(found)


def render(result: Mismatch, *, title: str) -> RenderableType:
    """Two tables and the advice, for a terminal."""
    figures = Table(title=title, title_justify="left")
    figures.add_column("figure")
    figures.add_column("value", justify="right")
    figures.add_column("meaning")
    for name, value, meaning in (
        ("tokens", str(result.num_tokens), f"in {result.num_sequences} sampled sequences"),
        ("|Δ| mean", f"{result.mean_abs:.2e}", "difference of log-probabilities, trainer − engine"),
        ("|Δ| max", f"{result.max_abs:.2e}", "the worst token"),
        ("k1", f"{result.k1:+.2e}", "KL(engine ‖ trainer), unbiased estimate"),
        ("k3", f"{result.k3:.2e}", "the same, never negative"),
        ("Pearson", f"{result.pearson:.6f}", "correlation of the probabilities"),
        ("ESS tokens", f"{result.ess_token:.2%}", "effective share under per-token weights"),
        ("ESS sequences", f"{result.ess_sequence:.2%}", "effective share under whole-sequence weights"),
    ):
        figures.add_row(name, value, meaning)
    worst = Table(title="worst tokens", title_justify="left")
    for heading in ("after", "token", "engine", "trainer", "Δ"):
        worst.add_column(heading, justify="left" if heading in ("after", "token") else "right")
    for each in result.worst:
        delta = each.trainer - each.engine
        shown = (repr(each.context), repr(each.token), f"{each.engine:.4f}", f"{each.trainer:.4f}", f"{delta:+.1e}")
        worst.add_row(*shown)
    return Group(figures, worst, f'algorithm.correction = "{result.correction}": {result.reason}')
