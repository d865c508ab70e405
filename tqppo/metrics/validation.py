"""Figures of a validation: mean@k, best@k, maj@k and greedy, per data source, under verl's names. Imports no torch.

best@n and maj@n estimate the result of n fresh samples: the expectation over all subsets of n of the k samples (without
replacement, so best@k is the best sample). verl resamples with replacement, which gives lower figures. Subsets are
counted in closed form (best) or listed (maj), and drawn with a fixed seed if there are more than `MAX_SUBSETS`.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tqppo.protocols import Metrics

MAX_SUBSETS = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored answer. `metrics` are the reward function's further numbers, such as `acc`."""

    prompt: str
    source: str
    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    prediction: str | None = None
    is_greedy: bool = False


def figures(answers: Iterable[Answer]) -> Metrics:
    """`val-core/<source>/<acc or reward>/{mean@k,best@k,maj@k,greedy}`, and the rest under `val-aux/`."""
    by_source: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_source[answer.source].append(answer)
    found: Metrics = {}
    for source in sorted(by_source):
        found |= _figures_of_source(source, by_source[source])
    return found


def reverse_kl(tags: Iterable[Mapping[str, Any]]) -> Metrics:
    """The student's divergence from its teachers: the mean of log q - log p over the tokens that it sampled.

    `val-core/distillation/reverse_kl/mean` over all rows that a teacher scored, and of each teacher under `val-aux/`.
    """
    sums: dict[str, list[float]] = {}
    for tag in tags:
        if "teacher_kl" in tag:
            figures = sums.setdefault(tag["teacher"], [0.0, 0.0])
            figures[0] += tag["teacher_kl"]
            figures[1] += tag["teacher_tokens"]
    if not sums:
        return {}
    total, count = (math.fsum(each[i] for each in sums.values()) for i in (0, 1))
    found = {"val-core/distillation/reverse_kl/mean": total / count}
    return found | {f"val-aux/distillation/reverse_kl/{name}": kl / n for name, (kl, n) in sorted(sums.items())}


def _figures_of_source(source: str, answers: Sequence[Answer]) -> Metrics:
    names = set().union(*(answer.metrics for answer in answers))
    core = "acc" if "acc" in names else "reward"
    groups: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        if not answer.is_greedy:
            groups[answer.prompt].append(answer)
    greedy = [answer for answer in answers if answer.is_greedy]
    found: Metrics = {}
    for name in sorted(names | {"reward"}):
        values = {"greedy": _mean([_value(answer, name) for answer in greedy])} if greedy else {}
        values |= _figures_of_groups(list(groups.values()), name) if groups else {}
        largest = max((len(group) for group in groups.values()), default=0)
        for figure, value in values.items():
            is_core = name == core and figure in (
                "greedy",
                f"mean@{largest}",
                f"best@{largest}",
                f"maj@{largest}",
            )
            found[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{figure}"] = value
    return found


def _figures_of_groups(groups: Sequence[Sequence[Answer]], name: str) -> Metrics:
    largest = max(len(group) for group in groups)
    values = [[_value(answer, name) for answer in group] for group in groups]
    found = {f"mean@{largest}": _mean([_mean(each) for each in values])}
    if largest == 1:
        return found
    found[f"std@{largest}"] = _mean([_deviation(each) for each in values])
    votes = all(answer.prediction is not None for group in groups for answer in group)
    for n in _sizes(largest):
        found[f"best@{n}"] = _mean([best_of(each, min(n, len(each))) for each in values])
        found[f"worst@{n}"] = -_mean([best_of([-value for value in each], min(n, len(each))) for each in values])
        if votes:
            ballots = [
                [(answer.prediction or "", value) for answer, value in zip(group, row, strict=True)]
                for group, row in zip(groups, values, strict=True)
            ]
            found[f"maj@{n}"] = _mean([majority_of(ballot, min(n, len(ballot))) for ballot in ballots])
    return found


def best_of(values: Sequence[float], n: int) -> float:
    """The expected maximum of n of the k values. The i-th smallest is the maximum of C(i − 1, n − 1) of the C(k, n)
    subsets."""
    ordered, total = sorted(values), math.comb(len(values), n)
    return math.fsum(value * math.comb(i, n - 1) for i, value in enumerate(ordered)) / total


def majority_of(ballots: Sequence[tuple[str, float]], n: int) -> float:
    """The expected value of the most frequent prediction among n answers; the mean of those that tie."""
    subsets = list(_subsets(len(ballots), n))
    return _mean([_vote([ballots[i] for i in subset]) for subset in subsets])


def _vote(ballots: Sequence[tuple[str, float]]) -> float:
    counts = Counter(prediction for prediction, _ in ballots)
    most = max(counts.values())
    values: dict[str, float] = {}
    for prediction, value in ballots:
        if counts[prediction] == most:
            values.setdefault(prediction, value)
    return _mean(list(values.values()))


def _subsets(k: int, n: int) -> Iterator[Sequence[int]]:
    if math.comb(k, n) <= MAX_SUBSETS:
        yield from combinations(range(k), n)
        return
    rng = random.Random(f"{k}/{n}")
    for _ in range(MAX_SUBSETS):
        yield rng.sample(range(k), n)


def _sizes(k: int) -> list[int]:
    """2, 4, 8, … and k itself."""
    powers = [2**i for i in range(1, k.bit_length()) if 2**i < k]
    return [*powers, k]


def _value(answer: Answer, name: str) -> float:
    return answer.score if name == "reward" else answer.metrics.get(name, 0.0)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
