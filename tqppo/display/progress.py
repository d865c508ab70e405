"""The data behind a run's display: curves, pace, first and last validation. `panel` and `display` draw it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tqppo.display.charts import number

REWARD = ("critic/score/mean", "critic/rewards/mean", "reward/mean")
FIGURES = (  # label, metric; the first of each label that a step has is shown
    ("length", "response_length/mean"),
    ("KL", "actor/ppo_kl"),
    ("KL ref", "actor/kl_loss"),
    ("KL ref", "actor/reward_kl_penalty"),
    ("entropy", "actor/entropy"),
    ("distill", "distillation/loss"),
    ("value loss", "critic/vf_loss"),
    ("grad norm", "actor/grad_norm"),
)
PACE_STEPS = 20  # the pace is the mean of this many steps


@dataclass(frozen=True, slots=True)
class Validated:
    """One validation figure: its first and its latest value, and the steps of both."""

    name: str
    first: float
    last: float
    step: int
    first_step: int = 0

    @property
    def has_change(self) -> bool:
        """Whether there were two validations, so that there is something to compare."""
        return self.step > self.first_step


@dataclass
class Progress:
    """A run's progress, updated by `add` after every step."""

    title: str
    subtitle: str = ""
    max_steps: int = 0
    step: int = 0
    example: str = ""  # a prompt with the model's answer and its reward
    steps: int = 0  # training steps seen, those before a resume included
    reward: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)  # of each label in FIGURES
    _first: dict[str, float] = field(default_factory=dict)
    _validated: dict[str, float] = field(default_factory=dict)
    _validated_at: int = -1
    _first_at: dict[str, int] = field(default_factory=dict)
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    _stages: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    _started: float = field(default_factory=time.monotonic)
    _stamp: float = field(default_factory=time.monotonic)
    _seconds: float | None = None  # of all steps, once the run is over

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        if core:
            self._first = {**core, **self._first}
            self._first_at = {**dict.fromkeys(core, step), **self._first_at}
            self._validated |= core
            self._validated_at = step
        self.step = step
        if step:
            self.steps += 1
            self.last = dict(metrics)
            self._pace.append(metrics.get("timing_s/step", now - self._stamp))
            self._stages.append(_stage_seconds(metrics))
            for label, value in self._shown(metrics).items():
                self.history.setdefault(label, []).append(value)
            reward = next((metrics[name] for name in REWARD if name in metrics), None)
            if reward is not None:
                self.reward.append(reward)
        self._stamp = now

    def recall(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Take in the lines of metrics.jsonl."""
        for row in rows:
            known = {name: value for name, value in row.items() if value is not None}
            self.add(int(known.pop("step")), known)

    def restart_clock(self) -> None:
        """Restart the measurement, after the steps of an earlier attempt were added."""
        self._started = self._stamp = time.monotonic()
        self._pace.clear()
        self._stages.clear()

    def stop_clock(self, seconds: float) -> None:
        """Show this time from now on, because the run is over."""
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started if self._seconds is None else self._seconds

    @property
    def seconds_per_step(self) -> float:
        return sum(self._pace) / len(self._pace) if self._pace else 0.0

    @property
    def seconds_left(self) -> float:
        return max(self.max_steps - self.step, 0) * self.seconds_per_step

    @property
    def tokens_per_second(self) -> float:
        if "perf/throughput" in self.last:
            return self.last["perf/throughput"]
        seconds = self.seconds_per_step
        return self.last.get("perf/total_num_tokens", 0.0) / seconds if seconds else 0.0

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage in the last steps; a single one would show a validation as if every step had it."""
        names = sorted({name for stages in self._stages for name in stages})
        return {name: math.fsum(stages.get(name, 0.0) for stages in self._stages) for name in names}

    def figures(self) -> list[tuple[str, str]]:
        """(label, value) of the few numbers that every step shows."""
        found = {label: number(value) for label, value in self._shown(self.last).items()}
        if self.tokens_per_second:
            found["tok/s"] = number(self.tokens_per_second)
        if self.seconds_per_step:
            found["s/step"] = f"{self.seconds_per_step:.2f}"
        return list(found.items())

    @staticmethod
    def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for label, name in FIGURES:
            if name in metrics:
                found.setdefault(label, metrics[name])
        return found

    def validations(self) -> list[Validated]:
        """Sampled and greedy figures per data source, sampled first."""
        ranked = sorted(self._validated, key=_rank)
        return [
            Validated(
                _readable(name), self._first[name], self._validated[name], self._validated_at, self._first_at[name]
            )
            for name in ranked
        ]

    def fresh_validation(self) -> list[Validated]:
        """The validation of the step just added, if there was one."""
        return self.validations() if self._validated_at == self.step else []


def _stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    stages = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    return {name: value for name, value in stages.items() if name != "step"}


def _rank(name: str) -> tuple[str, int, str]:
    _, source, _, figure = name.rsplit("/", 3) if name.count("/") >= 3 else ("", name, "", "")
    order = ("mean@", "greedy", "best@", "maj@")
    return source, next((i for i, start in enumerate(order) if figure.startswith(start)), len(order)), figure


def _readable(name: str) -> str:
    """`val-core/sort/acc/mean@1` → `sort acc, sampled`."""
    source, variable, figure = name.removeprefix("val-core/").rsplit("/", 2)
    kind = "sampled" if figure == "mean@1" else f"sampled mean@{figure[5:]}" if figure.startswith("mean@") else figure
    return f"{source} {variable}, {kind}"
