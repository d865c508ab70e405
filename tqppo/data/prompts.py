"""Prompts as token ids, and the seeded, resumable sampler that the trainers draw them from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypedDict, cast, overload

import numpy as np

from tqppo.builtin import is_procedural
from tqppo.data import dataset
from tqppo.data.layout import AUTO, DEFAULT_SOURCE_KEY, Dataset, Message, Row, text_of
from tqppo.data.mixture import Mixture, RowOrder, shuffled
from tqppo.errors import CheckpointError, DataError, PreflightError
from tqppo.protocols import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["error", "drop", "truncate"]
CHECKED_AT_ONCE = 1024  # rows in memory while the whole dataset is checked


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for an engine. `text` is the text of the tokens; `answer` and `extra` are JSON values."""

    uid: str
    index: int
    tokens: list[int]
    answer: object
    source: str
    extra: dict[str, object]
    text: str
    messages: list[Message] = field(default_factory=list)
    is_chat: bool = True  # whether the dataset has messages, and not plain text

    @property
    def question(self) -> str | list[Message]:
        """The prompt as the dataset has it: messages, or plain text."""
        return self.messages if self.is_chat or not self.messages else str(self.messages[-1]["content"])

    def column(self, name: str) -> object:
        """The value of a further column of the row, None if it has none; a dot goes into a nested column."""
        value: object = self.extra
        for part in name.removeprefix("extra_info.").split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Which data to read and how to render it: the fields of the config's `[data]` that concern prompts."""

    train: str | Sequence[str] = "task:sort"
    task_args: Mapping[str, object] = field(default_factory=dict)
    size: int = 10_000
    shuffle: bool = True
    max_prompt_tokens: int = 512
    overlong: Overlong = "error"
    weights: Sequence[float] = ()
    prompt_key: str = AUTO
    answer_key: str = AUTO
    source_key: str = DEFAULT_SOURCE_KEY
    system_prompt: str = ""
    chat_template: bool = True

    @classmethod
    def of(cls, section: object) -> DataSpec:
        """Take the values from the config's section, or from anything with the same attributes."""
        return cls(**{name: getattr(section, name) for name in cls.__slots__})

    def rows(self, *, seed: int, held_out: bool = False, sources: str | Sequence[str] = "") -> Dataset:
        keys = dataset.Keys(self.prompt_key, self.answer_key, self.source_key)
        return dataset.load(
            sources or self.train, seed=seed, held_out=held_out, size=self.size, task_args=self.task_args, keys=keys
        )

    def messages(self, row: Row) -> list[Message]:
        if not isinstance(row.prompt, str):
            return row.prompt
        system: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": row.prompt}]


Demonstration = tuple[list[Message], str]


def demonstrations(spec: DataSpec, *, seed: int, held_out: bool = False) -> Sequence[Demonstration]:
    """(messages, answer) of each row, or what its task shows instead, for supervised training.

    Rows are read when they are used.
    """
    return _Demonstrations(spec, spec.rows(seed=seed, held_out=held_out))


@dataclass(frozen=True)
class _Demonstrations(Sequence[Demonstration]):
    spec: DataSpec
    rows: Dataset

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Demonstration: ...
    @overload
    def __getitem__(self, index: slice) -> list[Demonstration]: ...
    def __getitem__(self, index: int | slice) -> Demonstration | list[Demonstration]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        row = self.rows.row(index)
        return row.shown or (self.spec.messages(row), str(row.answer))


class PromptSet:
    """A dataset rendered and tokenized. Rows are rendered when they are read; nothing is random here."""

    def __init__(
        self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, spec: DataSpec, *, seed: int = 0, prefix: str = "p"
    ) -> None:
        self._rows, self._tokenizer, self._spec = rows, tokenizer, spec
        self._uid = f"{prefix}{seed}"
        self.seed, self.shuffle = seed, spec.shuffle
        if spec.chat_template and not getattr(tokenizer, "chat_template", None):
            raise PreflightError("the tokenizer has no chat template; set data.chat_template = false to use plain text")

    def __len__(self) -> int:
        return len(self._rows)

    def fingerprint(self) -> str:
        """A digest that changes when rows, order or rendering change; checkpoints hold it."""
        spec = self._spec
        rendering = (self.seed, spec.shuffle, spec.max_prompt_tokens, spec.overlong, spec.system_prompt)
        mixed = [list(spec.weights)] if spec.weights else []
        return dataset.digest([self._rows.fingerprint(), rendering, spec.chat_template, *mixed])

    def order(self, epoch: int) -> RowOrder:
        """The rows of an epoch as (pass, index), in the order in which they are drawn."""
        if self._spec.weights and isinstance(self._rows, dataset.Joined):
            return Mixture(self._rows.spans(), self._spec.weights, self.seed, self.shuffle).order(epoch)
        indexes = shuffled(len(self), [self.seed, epoch]) if self.shuffle else np.arange(len(self))
        return np.stack([np.full(len(self), epoch), indexes], axis=1)

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def prompt(self, index: int) -> Prompt:
        return self.prompts([(0, index)])[0]

    def prompts(self, places: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Render rows by (pass over their source, index), in full length."""
        rows = [self._rows.row(index) for _, index in places]
        messages = [self._spec.messages(row) for row in rows]
        texts = [self._render(each, index) for each, (_, index) in zip(messages, places, strict=True)]
        tokens = self._tokenizer(texts, add_special_tokens=not self._spec.chat_template)["input_ids"] if texts else []
        return [
            Prompt(
                uid=f"{self._uid}-{epoch}-{index}",
                index=index,
                tokens=ids,
                answer=row.answer,
                source=row.source,
                extra=row.extra,
                text=text,
                messages=chat,
                is_chat=not isinstance(row.prompt, str),
            )
            for (epoch, index), row, chat, text, ids in zip(places, rows, messages, texts, tokens, strict=True)
        ]

    def fit(self, prompt: Prompt) -> Prompt | None:
        """Apply `data.overlong`: return the prompt, its last tokens, or None to leave it out."""
        spec = self._spec
        if len(prompt.tokens) <= spec.max_prompt_tokens:
            return prompt
        if spec.overlong == "error":
            raise DataError(
                f"{self.where(prompt.index)}: the prompt has {len(prompt.tokens)} tokens, data.max_prompt_tokens is "
                f'{spec.max_prompt_tokens}; raise it, or set data.overlong = "drop" or "truncate"'
            )
        if spec.overlong == "drop":
            return None
        tokens = prompt.tokens[-spec.max_prompt_tokens :]
        return replace(prompt, tokens=tokens, text=str(self._tokenizer.decode(tokens)))

    def check(self) -> None:
        """Read every row, so that an overlong prompt or a broken row is an error now instead of at step 700."""
        for begin in range(0, len(self), CHECKED_AT_ONCE):
            for prompt in self.prompts([(0, index) for index in range(begin, min(begin + CHECKED_AT_ONCE, len(self)))]):
                self.fit(prompt)

    def first(self, num_prompts: int) -> list[Prompt]:
        """Up to `num_prompts` prompts in the dataset's own order, as many of each source, for validation."""
        found: list[Prompt] = []
        order = dataset.in_turns(self._rows)
        while len(found) < num_prompts and (indexes := list(islice(order, num_prompts - len(found)))):
            whole = self.prompts([(0, index) for index in indexes])
            found += [prompt for prompt in map(self.fit, whole) if prompt is not None]
        if not found:
            raise DataError(f"{self.where(0)}: no prompt is within data.max_prompt_tokens")
        return found

    def _render(self, messages: list[Message], index: int) -> str:
        if not self._spec.chat_template:
            return "".join(text_of(message) for message in messages)
        from jinja2 import TemplateError

        chat = cast(list[dict[str, str]], messages)  # content may be a list, too
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(
                f"{self.where(index)}: the model's chat template cannot render the messages: {why}"
            ) from None


def load(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    held_out: bool = False,
    sources: str | Sequence[str] = "",
    prefix: str = "p",
) -> PromptSet:
    """Load the prompts of `spec.train`, or of `sources` if given; `held_out` selects a procedural task's other part."""
    rows = spec.rows(seed=seed, held_out=held_out, sources=sources)
    return PromptSet(rows, tokenizer, spec, seed=seed, prefix=prefix)


def for_validation(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, *, seed: int, sources: str | Sequence[str] = ""
) -> PromptSet | None:
    """Held-out prompts: of `sources`, else the held-out part of the procedural sources in `spec.train`, else none.

    All rows of a file in `sources` are used: a file has no training part.
    """
    if not sources:
        train = [spec.train] if isinstance(spec.train, str) else spec.train
        sources = [each for each in train if is_procedural(each)]
    return load(spec, tokenizer, seed=seed, held_out=True, sources=sources, prefix="v") if sources else None


class SamplerState(TypedDict):
    """The part of a checkpoint that a sampler continues from."""

    epoch: int
    position: int
    dropped: int
    truncated: int
    fingerprint: str


class Sampler:
    """Endless prompts in a seeded order. A batch may hold the end of one epoch and the beginning of the next.

    The whole state is the cursor (epoch, position) and two counters, so that `restore` continues exactly.
    """

    def __init__(self, prompts: PromptSet) -> None:
        self._prompts = prompts
        self._epoch = self._position = self._dropped = self._truncated = 0
        self._order = prompts.order(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next_batch(self, num_prompts: int) -> list[Prompt]:
        batch: list[Prompt] = []
        misses = 0
        while len(batch) < num_prompts:
            whole = self._prompts.prompts([self._next() for _ in range(num_prompts - len(batch))])
            fitting = [self._prompts.fit(each) for each in whole]
            kept = [prompt for prompt in fitting if prompt is not None]
            self._dropped += len(whole) - len(kept)
            self._truncated += sum(a is not b for a, b in zip(whole, fitting, strict=True) if b is not None)
            misses = 0 if kept else misses + len(whole)
            if misses >= len(self._prompts):
                raise DataError(f"{self._prompts.where(0)}: every prompt is longer than data.max_prompt_tokens")
            batch += kept
        return batch

    def metrics(self) -> Metrics:
        return {
            "training/epoch": self._epoch,
            "data/dropped_prompts": self._dropped,
            "data/truncated_prompts": self._truncated,
        }

    def state(self) -> SamplerState:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "dropped": self._dropped,
            "truncated": self._truncated,
            "fingerprint": self._prompts.fingerprint(),
        }

    def restore(self, state: SamplerState) -> None:
        found = self._prompts.fingerprint()
        if state["fingerprint"] != found:
            raise CheckpointError(
                f"the training data changed since the checkpoint (fingerprint {state['fingerprint']}, now {found}); "
                "put the same files and data settings back, or start a new run"
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self._prompts.order(epoch)):
            raise CheckpointError(f"the checkpoint's place in the data is not there: {position} of epoch {epoch}")
        self._epoch, self._position = epoch, position
        self._dropped, self._truncated = state["dropped"], state["truncated"]
        self._order = self._prompts.order(self._epoch)

    def _next(self) -> tuple[int, int]:
        """Pass and index of the next row."""
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._prompts.order(self._epoch)
        self._position += 1
        number, index = self._order[self._position - 1]
        return int(number), int(index)
