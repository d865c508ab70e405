"""Scores trajectories with built-in reward functions and the user's own, each within a deadline.

The rollout worker calls `await scorer.score(...)`. Quick built-ins run in its own process, all others in processes
(`pool`) that are killed when a sample is late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from tqppo.errors import DataError, TqppoError
from tqppo.processes.pool import ProcessPool, ProcessSpec, SampleFailed
from tqppo.protocols import Incident
from tqppo.rewards.calls import RewardCall
from tqppo.rewards.functions import BUILT_IN, INLINE, own_reward

# A reward, and a sum of rewards, beyond this is a mistake: advantages square it, and their sums must fit into float32.
LARGEST = 1e9
OnError = Literal["error", "zero", "drop_group"]


class RewardError(DataError):
    """A reward function failed, and `reward.on_error` says to stop."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a trajectory that a reward function sees; all but text are JSON values.

    `prompt` is text or chat messages, as the dataset has it; `transcript` is the whole session as text.
    """

    source: str
    solution: str
    answer: object
    extra: Mapping[str, object] = field(default_factory=dict)
    prompt: object = ""
    transcript: str = ""


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
class FunctionSpec:
    """One reward function: its name as every process understands it, its arguments, its weight and its metric."""

    name: str
    arguments: Mapping[str, object]
    weight: float
    label: str


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """Which functions to call, and how: the fields of the config's `[reward]` and the limit on new tokens."""

    function: str | Sequence[str] = ""
    weights: Sequence[float] = ()
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
        named = given["function"]
        resolved = resolve(named) if isinstance(named, str) else [resolve(each) for each in named]
        return cls(**{**given, "function": resolved}, max_new_tokens=max_new_tokens)

    def functions(self) -> list[FunctionSpec]:
        """Each function with its own arguments: with several of them, `function_args` has a table for each label."""
        names = [self.function] if isinstance(self.function, str) else list(self.function) or [""]
        weights = list(self.weights) or [1.0] * len(names)
        if len(weights) != len(names):
            raise DataError(f"reward.weights has {len(weights)} weights for {len(names)} functions")
        if len(names) == 1:
            return [FunctionSpec(resolve(names[0]), dict(self.function_args), weights[0], label_of(names[0]))]
        labels = [label_of(name) for name in names]
        unknown = [name for name in self.function_args if name not in labels]
        if unknown or not all(isinstance(each, Mapping) for each in self.function_args.values()):
            wanted = f"function_args = {{ {labels[0]} = {{ … }} }}"
            raise DataError(f"with several reward functions, reward.function_args has a table for each: {wanted}")
        tables = {label: self.function_args.get(label, {}) for label in labels}
        return [
            FunctionSpec(resolve(name), cast(Mapping[str, object], tables[label]), weight, label)
            for name, label, weight in zip(names, labels, weights, strict=True)
        ]


def label_of(function: str) -> str:
    """The name of a function's metric: `accuracy` for `rewards.py:accuracy`."""
    return function.rpartition(":")[2] or "task"


def resolve(function: str) -> str:
    """The function's name as every process understands it: a file by its full path, an empty name as "task"."""
    place, _, attribute = function.rpartition(":")
    if place.endswith((".py", ".pkl")):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            again = ". It was given as an object from Python: give it again" if path.suffix == ".pkl" else ""
            raise DataError(f"reward function {function!r}: there is no file {path}{again}")
        return f"{path}:{attribute}"
    if not place and function and function not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise DataError(f"reward function {function!r}: no built-in has this name ({known}); write module:function")
    return function or "task"


def process_spec(function: FunctionSpec, timeout_s: float) -> ProcessSpec:
    """The process that runs the function."""
    return ProcessSpec(
        module="tqppo.rewards.process",
        what=f"reward function {function.name!r}",
        start={"function": function.name, "arguments": dict(function.arguments)},
        timeout_s=timeout_s,
    )


class ScoringFunction:
    """One function: a quick built-in runs here, any other in processes that are killed when a sample is late."""

    def __init__(self, spec: FunctionSpec, *, workers: int, timeout_s: float) -> None:
        self.spec, self._workers, self._timeout_s = spec, workers, timeout_s
        self._pool: ProcessPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        if spec.name in BUILT_IN:
            RewardCall(spec.name, BUILT_IN[spec.name], spec.arguments)  # raises for wrong arguments
        else:
            self.start()

    @property
    def wants_transcript(self) -> bool:
        return self._pool is not None and bool(self._pool.ready.get("wants_transcript"))

    def start(self) -> None:
        """Start the processes now instead of with the first sample that needs them."""
        if self._pool is None:
            self._pool = ProcessPool(process_spec(self.spec, self._timeout_s), max(self._workers, 1))
            self._threads = ThreadPoolExecutor(self._pool.num_slots, thread_name_prefix="reward")

    async def value(self, sample: Sample) -> object:
        """What the function returns for a sample; SampleFailed if it fails."""
        return self._inline(sample) if self._is_inline(sample) else await self._in_process(sample)

    def take_incidents(self) -> list[Incident]:
        """The processes that were replaced since the last call."""
        replaced = [] if self._pool is None else self._pool.take_replaced()
        return [Incident(f"a process of reward function {self.spec.name!r}", why) for why in replaced]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._pool = self._threads = None

    def _is_inline(self, sample: Sample) -> bool:
        name = own_reward(sample.extra) if self.spec.name == "task" else self.spec.name
        return self._workers == 0 and name in INLINE

    def _inline(self, sample: Sample) -> object:
        function = BUILT_IN[self.spec.name]
        try:
            return function(sample.source, sample.solution, sample.answer, sample.extra, **self.spec.arguments)
        except TqppoError:
            raise
        except (ValueError, TypeError, ArithmeticError) as error:
            raise SampleFailed(f"{type(error).__name__}: {error}") from error

    async def _in_process(self, sample: Sample) -> object:
        self.start()
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.call, asdict(sample))


class Scorer:
    """Scores samples, each within its deadline. `close` leaves no process behind.

    The constructor raises DataError for a function that cannot be imported or called, before anything is generated.
    """

    def __init__(self, spec: ScorerSpec) -> None:
        self._spec = spec
        self._functions: list[ScoringFunction] = []
        try:
            for each in spec.functions():
                self._functions.append(ScoringFunction(each, workers=spec.workers, timeout_s=spec.timeout_s))
        except BaseException:
            self.close()
            raise

    @property
    def wants_transcript(self) -> bool:
        """Whether a function asks for the whole session as text."""
        return any(each.wants_transcript for each in self._functions)

    def start(self) -> None:
        """Start the processes now instead of with the first sample that needs them."""
        for each in self._functions:
            each.start()

    def warm_up(self) -> None:
        """Start the processes that the functions will need, so that the first score shows the function's own time."""
        for each in self._functions:
            if each.spec.name not in INLINE and each.spec.name != "task":
                each.start()

    async def score(
        self,
        source: str,
        solution: str,
        answer: object,
        extra: Mapping[str, object] | None = None,
        *,
        prompt: object = "",
        transcript: str = "",
        response_tokens: int = 0,
    ) -> Reward:
        """Return the reward of one answer; its length in `response_tokens` serves the penalty on overlong answers."""
        sample = Sample(source, solution, answer, extra or {}, prompt, transcript)
        if len(self._functions) == 1:
            only = await self._only(self._functions[0], sample)
            return only if only.failure else self._checked(self._penalised(only, response_tokens), sample)
        found = await asyncio.gather(*(self._one(each, sample) for each in self._functions))
        failed = next((each for each in found if each is not None and each.failure), None)
        if failed is not None:
            return failed
        weights = [each.spec for each in self._functions]
        return self._checked(self._penalised(combined(weights, found), response_tokens), sample)

    async def _only(self, function: ScoringFunction, sample: Sample) -> Reward:
        """The reward where there is one function: a task for it would cost more than a built-in one."""
        try:
            reward = to_reward(await function.value(sample))
        except SampleFailed as failure:
            return self._failed(function.spec.name, sample, str(failure))
        weight = function.spec.weight
        return reward if weight == 1 else replace(reward, score=weight * reward.score)

    async def _one(self, function: ScoringFunction, sample: Sample) -> Reward | None:
        """The reward of one of several functions. None: it has nothing to say of this sample, and others may."""
        try:
            value = await function.value(sample)
            return None if value is None else to_reward(value)
        except SampleFailed as failure:
            return self._failed(function.spec.name, sample, str(failure))

    def take_incidents(self) -> list[Incident]:
        """The processes that were replaced since the last call."""
        return [incident for each in self._functions for incident in each.take_incidents()]

    def close(self) -> None:
        for each in self._functions:
            each.close()

    def _checked(self, reward: Reward, sample: Sample) -> Reward:
        """The reward, if weights and penalties left it a number that can be trained on."""
        if (problem := unusable(reward.score)) is None:
            return reward
        return self._failed(
            ", ".join(each.spec.name for each in self._functions), sample, f"with its weights, its score {problem}"
        )

    def _penalised(self, reward: Reward, num_tokens: int) -> Reward:
        spec = self._spec
        if not spec.overlong_buffer:
            return reward
        penalty = overlong_penalty(
            num_tokens, max_new_tokens=spec.max_new_tokens, buffer=spec.overlong_buffer, factor=spec.overlong_factor
        )
        metrics = {**reward.metrics, "overlong_penalty": penalty}
        return replace(reward, score=reward.score + penalty, metrics=metrics)

    def _failed(self, name: str, sample: Sample, why: str) -> Reward:
        message = f"reward function {name!r} failed on a sample of {sample.source!r}: {why}"
        if self._spec.on_error == "error":
            raise RewardError(
                f"{message}. The sample was {sample.solution!r:.200}. "
                'Set reward.on_error = "zero" or "drop_group" to continue without it'
            )
        return Reward(0.0, failure=message, drop_group=self._spec.on_error == "drop_group")


def combined(functions: Sequence[FunctionSpec], found: Sequence[Reward | None]) -> Reward:
    """The weighted sum; each score is a metric, `acc` and the answer are the first function's."""
    given = [(function, reward) for function, reward in zip(functions, found, strict=True) if reward is not None]
    score = math.fsum(function.weight * reward.score for function, reward in given)
    metrics: dict[str, float] = {}
    for function, reward in given:
        metrics[function.label] = reward.score
        for name, value in reward.metrics.items():
            metrics.setdefault(name if name == "acc" else f"{function.label}/{name}", value)
    prediction = next((reward.prediction for _, reward in given if reward.prediction is not None), None)
    return Reward(score, metrics, prediction)


def to_reward(value: object) -> Reward:
    """Read a function's value: a number, or a dict with `score`, further numbers (metrics) and perhaps `pred`, the
    answer that it read."""
    fields: dict[object, object] = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in fields:
        raise SampleFailed(f"the dict it returned has no 'score'; it has {', '.join(map(str, fields)) or 'nothing'}")
    score = fields.pop("score")
    if (problem := unusable(score)) is not None:
        raise SampleFailed(f"its score {problem}")
    assert isinstance(score, int | float)
    prediction = fields.pop("pred", None)
    extra = {str(key): _metric(str(key), number) for key, number in fields.items() if isinstance(number, (int, float))}
    return Reward(float(score), extra, None if prediction is None else str(prediction))


def unusable(score: object) -> str | None:
    """Why a score cannot be trained on; None if it can."""
    if not isinstance(score, int | float) or (isinstance(score, float) and not math.isfinite(score)):
        return f"is {score!r}, which is not a finite number"
    if abs(score) > LARGEST:
        shown = f"{score:g}" if isinstance(score, float) else f"an integer of {score.bit_length()} bits"
        return f"is {shown}; rewards beyond ±{LARGEST:g} cannot be trained on"
    return None


def _metric(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SampleFailed(f"its metric {name!r} is {number}, which is not a finite number")
    return number


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft limit: 0 up to max_new_tokens − buffer, then down in a straight line to −factor at the limit."""
    if buffer <= 0:
        return 0.0
    excess = num_tokens - (max_new_tokens - buffer)
    return -factor * min(max(excess / buffer, 0.0), 1.0)
