"""Looks at a dataset for `tqppo data show`: its rows as the model sees them, and how long they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tqppo.data import prompts
from tqppo.data.prompts import DataSpec, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEASURED_ROWS = 20_000  # of a larger dataset the lengths of the first ones are shown
BINS = 8
BAR = 40
SHOWN_TEXT = 1_000


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as the model sees it."""

    where: str
    text: str
    tokens: int
    answer: object
    source: str
    extra: dict[str, object]


@dataclass(frozen=True, slots=True)
class DataLook:
    """What a dataset looks like. `lengths` are tokens per prompt, of the first rows of a large dataset."""

    num_rows: int
    sources: dict[str, int]
    lengths: list[int]
    rows: list[ShownRow]


def look_at(spec: DataSpec, tokenizer: PreTrainedTokenizerBase, *, seed: int, first: int, count: int) -> DataLook:
    """Read the rows of `spec.train`; every row that is measured is rendered, so that a broken one is an error."""
    loaded = prompts.load(spec, tokenizer, seed=seed)
    lengths: list[int] = []
    sources: Counter[str] = Counter()
    for begin in range(0, min(len(loaded), MEASURED_ROWS), prompts.CHECKED_AT_ONCE):
        end = min(begin + prompts.CHECKED_AT_ONCE, len(loaded), MEASURED_ROWS)
        for prompt in loaded.prompts([(0, index) for index in range(begin, end)]):
            lengths.append(len(prompt.tokens))
            sources[prompt.source] += 1
    wanted = range(first, min(first + count, len(loaded)))
    rows = [_shown(loaded.where(index), loaded.prompt(index)) for index in wanted]
    return DataLook(len(loaded), dict(sources.most_common()), lengths, rows)


def _shown(where: str, prompt: Prompt) -> ShownRow:
    return ShownRow(where, prompt.text, len(prompt.tokens), prompt.answer, prompt.source, prompt.extra)


def histogram(lengths: Sequence[int], bins: int = BINS) -> list[tuple[int, int, int]]:
    """(shortest, longest, rows) of equally wide ranges of lengths."""
    low, high = min(lengths), max(lengths)
    bins = min(bins, high - low + 1)
    edges = [low + (high + 1 - low) * i // bins for i in range(bins + 1)]
    return [(a, b - 1, sum(a <= length < b for length in lengths)) for a, b in pairwise(edges)]


def render(look: DataLook, spec: DataSpec, model: str, echo: Callable[[str], None]) -> None:
    for row in look.rows:
        echo(f"{row.where}  ({row.tokens} tokens)")
        _field(echo, "prompt", row.text)
        _field(echo, "answer", str(row.answer))
        _field(echo, "source", row.source)
        if row.extra:
            _field(echo, "columns", ", ".join(row.extra))
        echo("")
    sources = ", ".join(f"{name} ({count})" for name, count in list(look.sources.items())[:8])
    echo(f"{look.num_rows} rows; sources: {sources}")
    mean = sum(look.lengths) / len(look.lengths)
    of = f"the first {len(look.lengths)} prompts" if len(look.lengths) < look.num_rows else "all prompts"
    echo(f"tokens of {of} ({model}): {min(look.lengths)} to {max(look.lengths)}, mean {mean:.0f}")
    table = histogram(look.lengths)
    most = max(rows for _, _, rows in table)
    width = len(str(table[-1][1]))
    for low, high, rows in table:
        echo(f"  {low:>{width}} – {high:>{width}}  {'█' * round(BAR * rows / most):<{BAR}} {rows}")
    over = sum(length > spec.max_prompt_tokens for length in look.lengths)
    if over:
        echo(f"{over} prompts are longer than data.max_prompt_tokens = {spec.max_prompt_tokens}")


def _field(echo: Callable[[str], None], name: str, text: str) -> None:
    shown = text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]} … ({len(text)} characters)"
    indented = shown.replace("\n", "\n" + " " * 11)
    echo(f"  {name:<8} {indented}")
