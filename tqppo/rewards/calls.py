"""How a reward function is called. Its parameters say whose signature it has: verl's, verl's for batches, or TRL's.

- verl: `f(data_source, solution_str, ground_truth, extra_info)`, one answer at a time. A function that also names
  `prompt`, `messages` (prompt and answer as a chat) or `transcript` (all tokens of the session as text) gets them.
- verl, batch: `f(data_sources, solution_strs, ground_truths, extra_infos)`, lists in, a list out.
- TRL: `f(prompts, completions, **columns)`, lists in, a list out; `None` means that it has nothing to say of an answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tqppo.errors import DataError

RewardFunction = Callable[..., object]
Signature = Literal["verl", "verl batch", "TRL"]
Sent = Mapping[str, object]  # a sample as JSON: source, solution, answer, extra, prompt, transcript
FURTHER = ("prompt", "messages", "transcript")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")  # the reference answer under its usual names


def signature_of(function: RewardFunction) -> Signature:
    names = inspect.signature(function).parameters
    if "completions" in names:
        return "TRL"
    return "verl batch" if "solution_strs" in names else "verl"


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives an awaitable; also for an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class RewardCall:
    """A function with its own arguments, called with samples in the form that it expects."""

    name: str
    function: RewardFunction
    arguments: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise now what would fail at the first sample."""
        asked = dict.fromkeys(self._required_columns()) if self.signature == "TRL" else {}
        values = self._named([]) if self.signature != "verl" else self._one_named({})
        try:
            self._parameters.bind(**{**asked, **values, **self.arguments})
        except TypeError as error:
            raise DataError(f"reward function {self.name!r} {self._refusal(error)}") from None

    def _refusal(self, error: TypeError) -> str:
        """Why the function cannot be called, and what to write."""
        if inspect.isclass(self.function):
            return (
                f"is a class: name an instance, such as one made by `judge = {self.function.__name__}(…)` in the file"
            )
        parameters = self._parameters.parameters.values()
        if wanted := [
            each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty
        ]:
            missing = [name for name in wanted if name not in self.arguments]
            if missing:
                return f"needs reward.function_args = {{ {', '.join(f'{name} = …' for name in missing)} }}"
        return (
            "cannot be called as f(data_source, solution_str, ground_truth, extra_info, **reward.function_args), nor "
            f"as f(prompts, completions, **columns): {error}"
        )

    @cached_property
    def signature(self) -> Signature:
        return signature_of(self.function)

    @cached_property
    def is_async(self) -> bool:
        return is_async(self.function)

    @property
    def is_batch(self) -> bool:
        return self.signature != "verl"

    @property
    def wants_transcript(self) -> bool:
        return "transcript" in self._parameters.parameters

    def one(self, sample: Sent) -> object:
        """The value of one sample, of a function that is not async."""
        if self.is_batch:
            return self.many([sample])[0]
        return self.function(**self._one_named(sample), **self.arguments)

    async def one_async(self, sample: Sent) -> object:
        if not self.is_batch:
            return await _awaited(self.function(**self._one_named(sample), **self.arguments))
        values = await _awaited(self.function(**self._named([sample]), **self.arguments))
        return self._checked(values, 1)[0]

    def many(self, samples: Sequence[Sent]) -> list[object]:
        """The values of samples, of a batch function that is not async."""
        return self._checked(self.function(**self._named(samples), **self.arguments), len(samples))

    @cached_property
    def _parameters(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def _one_named(self, sample: Sent) -> dict[str, object]:
        own = {name: sample.get(key) for name, key in zip(VERL, ("source", "solution", "answer", "extra"), strict=True)}
        further = {"prompt": sample.get("prompt"), "transcript": sample.get("transcript"), "messages": chat(sample)}
        wanted = [name for name in FURTHER if name in self._parameters.parameters and name not in self.arguments]
        return own | {name: further[name] for name in wanted}

    def _named(self, samples: Sequence[Sent]) -> dict[str, object]:
        if self.signature == "verl batch":
            keys = zip(VERL_BATCH, ("source", "solution", "answer", "extra"), strict=True)
            return {name: [each[key] for each in samples] for name, key in keys}
        columns = {name: [columns_of(each).get(name) for each in samples] for name in self._columns(samples)}
        prompts = [each.get("prompt") for each in samples]
        completions = [completion(each) for each in samples]
        given = {**columns, "prompts": prompts, "completions": completions}
        return {name: value for name, value in given.items() if self._takes(name)}

    def _columns(self, samples: Sequence[Sent]) -> list[str]:
        names = dict.fromkeys(name for each in samples for name in columns_of(each))
        missing = [name for name in self._required_columns() if samples and name not in names]
        if missing:
            raise DataError(f"the reward function asks for column {missing[0]!r}, and rows have {', '.join(names)}")
        return [name for name in names if name not in self.arguments]

    def _required_columns(self) -> list[str]:
        parameters = self._parameters.parameters.values()
        own = {"prompts", "completions", *self.arguments}
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = (each for each in parameters if each.default is each.empty and each.kind in named)
        return [each.name for each in required if each.name not in own]

    def _takes(self, name: str) -> bool:
        parameters = self._parameters.parameters
        return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def _checked(self, values: object, count: int) -> list[object]:
        found = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else None
        if found is None and hasattr(values, "tolist"):  # an array or a tensor
            found = values.tolist()
        if not isinstance(found, list) or len(found) != count:
            raise DataError(f"the reward function should return a list of {count} scores, not {values!r:.80}")
        return found


def chat(sample: Sent) -> list[object]:
    """The prompt and the answer as messages."""
    prompt = sample.get("prompt")
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return [*before, {"role": "assistant", "content": sample.get("solution")}]


def completion(sample: Sent) -> object:
    """The answer as TRL gives it: a list with one message if the prompt is a chat, else text."""
    text = sample.get("solution")
    return [{"role": "assistant", "content": text}] if isinstance(sample.get("prompt"), list) else text


def columns_of(sample: Sent) -> dict[str, object]:
    """The row's columns by name: further ones, its source, and the reference answer under each of its usual names."""
    extra = sample.get("extra")
    answer = {name: sample.get("answer") for name in ANSWER_COLUMNS}
    return {**answer, "data_source": sample.get("source"), **(extra if isinstance(extra, Mapping) else {})}


async def _awaited(value: object) -> object:
    return await value if isinstance(value, Awaitable) else value
