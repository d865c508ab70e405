"""Scores trajectories with a built-in reward function or the user's own, each within a deadline.

The rollout worker calls `await scorer.score(...)`. Quick built-ins run in its own process, all others in processes
(`pool`) that are killed when a sample is late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tqppo.errors import DataError, TqppoError
from tqppo.processes.pool import ProcessPool, ProcessSpec, SampleFailed
from tqppo.rewards.functions import BUILT_IN, INLINE, own_reward
from tqppo.rewards.process import check_signature

OnError = Literal["error", "zero", "drop_group"]


class RewardError(DataError):
    """A reward function failed, and `reward.on_error` says to stop."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a trajectory that a reward function sees; `answer` and `extra` are JSON values."""

    source: str
    solution: str
    answer: object
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """A score, further numbers that become metrics, and the answer that the function read, for majority votes.

    `failure` says why the function gave no score. The score is then 0, and `drop_group` follows `reward.on_error`.
    """

    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    prediction: str | None = None
    failure: str = ""
    drop_group: bool = False


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """Which function to call, and how: the fields of the config's `[reward]` and the limit on new tokens."""

    function: str = ""
    function_args: Mapping[str, object] = field(default_factory=dict)
    workers: int = 0
    timeout_s: float = 30.0
    on_error: OnError = "error"
    overlong_buffer: int = 0
    overlong_factor: float = 1.0
    max_new_tokens: int = 0

    @classmethod
    def of(cls, section: object, *, max_new_tokens: int) -> ScorerSpec:
        """Take the values from the config's section, or from anything with the same attributes."""
        given = {name: getattr(section, name) for name in cls.__slots__ if name != "max_new_tokens"}
        return cls(**{**given, "function": resolve(given["function"])}, max_new_tokens=max_new_tokens)


def resolve(function: str) -> str:
    """The function's name as every process understands it: a file by its full path, an empty name as "task"."""
    place, _, attribute = function.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise DataError(f"reward function {function!r}: there is no file {path}")
        return f"{path}:{attribute}"
    if not place and function and function not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise DataError(f"reward function {function!r}: no built-in has this name ({known}); write module:function")
    return function or "task"


def process_spec(spec: ScorerSpec) -> ProcessSpec:
    """The process that runs the function."""
    name = resolve(spec.function)
    return ProcessSpec(
        module="tqppo.rewards.process",
        what=f"reward function {name!r}",
        start={"function": name, "arguments": dict(spec.function_args)},
        timeout_s=spec.timeout_s,
    )


class Scorer:
    """Scores samples, each within its deadline. `close` leaves no process behind.

    The constructor raises DataError for a function that cannot be imported or called, before anything is generated.
    """

    def __init__(self, spec: ScorerSpec) -> None:
        self._spec = spec
        self._function = name = resolve(spec.function)
        self._pool: ProcessPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        if name in BUILT_IN:
            check_signature(name, BUILT_IN[name], spec.function_args)
        else:
            self.start()

    def start(self) -> None:
        """Start the processes now instead of with the first sample that needs them."""
        if self._pool is None:
            self._pool = ProcessPool(process_spec(self._spec), max(self._spec.workers, 1))
            self._threads = ThreadPoolExecutor(self._pool.num_slots, thread_name_prefix="reward")

    async def score(
        self,
        source: str,
        solution: str,
        answer: object,
        extra: Mapping[str, object] | None = None,
        *,
        response_tokens: int = 0,
    ) -> Reward:
        """Return the reward of one answer; its length in `response_tokens` serves the penalty on overlong answers."""
        sample = Sample(source, solution, answer, extra or {})
        try:
            value = self._inline(sample) if self._is_inline(sample) else await self._in_process(sample)
            return self._penalised(to_reward(value), response_tokens)
        except SampleFailed as failure:
            return self._failed(sample, str(failure))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._pool = self._threads = None

    def _is_inline(self, sample: Sample) -> bool:
        name = own_reward(sample.extra) if self._function == "task" else self._function
        return self._spec.workers == 0 and name in INLINE

    def _inline(self, sample: Sample) -> object:
        function = BUILT_IN[self._function]
        try:
            return function(sample.source, sample.solution, sample.answer, sample.extra, **self._spec.function_args)
        except TqppoError:
            raise
        except (ValueError, TypeError, ArithmeticError) as error:
            raise SampleFailed(f"{type(error).__name__}: {error}") from error

    async def _in_process(self, sample: Sample) -> object:
        self.start()
        assert self._pool is not None
        fields = {"source": sample.source, "solution": sample.solution, "answer": sample.answer, "extra": sample.extra}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.call, fields)

    def _penalised(self, reward: Reward, num_tokens: int) -> Reward:
        spec = self._spec
        if not spec.overlong_buffer:
            return reward
        penalty = overlong_penalty(
            num_tokens, max_new_tokens=spec.max_new_tokens, buffer=spec.overlong_buffer, factor=spec.overlong_factor
        )
        metrics = {**reward.metrics, "overlong_penalty": penalty}
        return replace(reward, score=reward.score + penalty, metrics=metrics)

    def _failed(self, sample: Sample, why: str) -> Reward:
        message = f"reward function {self._function!r} failed on a sample of {sample.source!r}: {why}"
        if self._spec.on_error == "error":
            raise RewardError(
                f"{message}. The sample was {sample.solution!r:.200}. "
                'Set reward.on_error = "zero" or "drop_group" to continue without it'
            )
        return Reward(0.0, failure=message, drop_group=self._spec.on_error == "drop_group")


def to_reward(value: object) -> Reward:
    """Read a function's value: a number, or a dict with `score`, further numbers (metrics) and perhaps `pred`, the
    answer that it read."""
    fields: dict[object, object] = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in fields:
        raise SampleFailed(f"the dict it returned has no 'score'; it has {', '.join(map(str, fields)) or 'nothing'}")
    score = fields.pop("score")
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise SampleFailed(f"its score is {score!r}, which is not a finite number")
    prediction = fields.pop("pred", None)
    extra = {str(key): float(number) for key, number in fields.items() if isinstance(number, (int, float))}
    return Reward(float(score), extra, None if prediction is None else str(prediction))


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft limit: 0 up to max_new_tokens − buffer, then down in a straight line to −factor at the limit."""
    if buffer <= 0:
        return 0.0
    excess = num_tokens - (max_new_tokens - buffer)
    return -factor * min(max(excess / buffer, 0.0), 1.0)
