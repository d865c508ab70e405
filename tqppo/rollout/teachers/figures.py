"""What a step's teachers did, counted where it happened and added up by the driver into metrics. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tqppo.protocols import Incident, Metrics


@dataclass(slots=True)
class TeacherFigures:
    """The calls of one teacher."""

    requests: int = 0
    rows: int = 0
    tokens: int = 0  # of the rows that the engine scored, prompts included
    cached_rows: int = 0
    retries: int = 0
    failures: int = 0  # calls that failed in all attempts
    dropped_groups: int = 0
    seconds: list[float] = field(default_factory=list)  # of each call, from the request to the answer
    span_s: float = 0.0  # from the first request to the last answer

    def add(self, other: TeacherFigures) -> None:
        self.requests += other.requests
        self.rows += other.rows
        self.tokens += other.tokens
        self.cached_rows += other.cached_rows
        self.retries += other.retries
        self.failures += other.failures
        self.dropped_groups += other.dropped_groups
        self.seconds += other.seconds
        self.span_s = max(self.span_s, other.span_s)

    def metrics(self, name: str) -> Metrics:
        found = {
            "requests": float(self.requests),
            "rows": float(self.rows),
            "cache_hits": float(self.cached_rows),
            "retries": float(self.retries),
            "failures": float(self.failures),
            "dropped_groups": float(self.dropped_groups),
            "tokens": float(self.tokens),
        }
        if self.seconds:
            found["tokens_per_s"] = self.tokens / self.span_s if self.span_s > 0 else 0.0
            found["latency_s/p50"] = quantile(self.seconds, 0.5)
            found["latency_s/p95"] = quantile(self.seconds, 0.95)
        return {f"teacher/{name}/{figure}": value for figure, value in found.items()}


@dataclass(slots=True)
class RolloutReport:
    """What a rollout returns besides its rows."""

    teachers: dict[str, TeacherFigures] = field(default_factory=dict)
    exposed_s: float = 0.0  # scoring that went on after the last row was sampled
    incidents: list[Incident] = field(default_factory=list)

    def of(self, teacher: str) -> TeacherFigures:
        return self.teachers.setdefault(teacher, TeacherFigures())

    @staticmethod
    def join(reports: Iterable[RolloutReport], *, one_after_the_other: bool = False) -> RolloutReport:
        """The sum of reports of workers side by side, or of rounds that followed each other."""
        total = RolloutReport()
        for report in reports:
            spans = {name: total.of(name).span_s + each.span_s for name, each in report.teachers.items()}
            for name, figures in report.teachers.items():
                total.of(name).add(figures)
            total.incidents += report.incidents
            exposed = (total.exposed_s, report.exposed_s)
            total.exposed_s = sum(exposed) if one_after_the_other else max(exposed)
            if one_after_the_other:
                for name, span_s in spans.items():
                    total.of(name).span_s = span_s
        return total

    def metrics(self) -> Metrics:
        if not self.teachers:
            return {}
        found: Metrics = {"teacher/exposed_s": self.exposed_s}
        for name, figures in self.teachers.items():
            found |= figures.metrics(name)
        return found


def quantile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
