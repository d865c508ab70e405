"""Configs, data files and what models and tools write."""

from __future__ import annotations

import io
import json
import random
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import tomli_w
from fuzz.mutations import TEXTS, changed, damaged, flipped

from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.plan.plan import make_plan
from tqppo.config.plan.text import plan_text
from tqppo.config.read.rows import column_values, source_values
from tqppo.data.files import read_file
from tqppo.data.layout import Keys
from tqppo.errors import ConfigError
from tqppo.rollout.tools.parsers import PARSERS
from tqppo.rollout.tools.process import _answer, as_text
from tqppo.rollout.tools.schema import Tool, WrongArguments, function_schema
from tqppo.untrusted import printable

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

PRESETS = sorted((Path(__file__).parents[2] / "presets").glob("*.toml"))


class Configs:
    """Presets with other values, other keys, or other bytes."""

    name = "configs"

    def __init__(self, folder: Path) -> None:
        self._path = folder / "case.toml"
        self._presets = [path.read_bytes() for path in PRESETS]

    def make(self, rng: random.Random) -> None:
        data = rng.choice(self._presets)
        if rng.random() < 0.5:
            with suppress(TypeError, ValueError, AttributeError):  # TOML has no such value
                data = tomli_w.dumps(changed(rng, tomllib.loads(data.decode()))).encode()  # type: ignore[arg-type]
        self._path.write_bytes(damaged(rng, data) if rng.random() < 0.6 else data)

    def read(self) -> None:
        compilation = compile_config(None, [self._path], environ={})
        text = render_text(compilation.diagnostics)
        if not compilation.ok:
            raise ConfigError(text)
        plan_text(make_plan(compilation))

    def close(self) -> None:
        pass


ROWS: list[dict[str, object]] = [
    {"prompt": "1+1=", "answer": "2", "data_source": "sums", "extra_info": {"index": 0, "split": "train"}},
    {"prompt": [{"role": "user", "content": "Hé?"}], "answer": "4", "data_source": "sums", "extra_info": {"index": 1}},
    {"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]},
    {"question": "3", "reward_model": {"style": "rule", "ground_truth": [1, 2.5, None]}, "data_source": "sums"},
]


class JsonLines:
    """JSONL, JSON and CSV files."""

    name = "jsonl"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "case.jsonl"

    def make(self, rng: random.Random) -> None:
        rows = [changed(rng, row) if rng.random() < 0.5 else row for row in rng.choices(ROWS, k=rng.randint(1, 4))]
        suffix = rng.choice((".jsonl", ".jsonl", ".json", ".csv"))
        self._path = self._folder / f"case{suffix}"
        if suffix == ".csv":
            text = "prompt,answer\n" + "\n".join(f'"{row}",{rng.choice(TEXTS)}' for row in rows)
        else:
            text = "\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps({"data": rows})
        data = text.encode("utf-8", "surrogatepass")
        self._path.write_bytes(damaged(rng, data) if rng.random() < 0.6 else data)

    def read(self) -> None:
        source_values(self._path, "data_source", "case")
        column_values(self._path, "extra_info.index")
        rows = read_file(self._path, Keys())
        printable("".join(str(rows.row(i)) for i in range(len(rows))))
        rows.fingerprint()

    def close(self) -> None:
        pass


class Parquets:
    """Parquet files whose bytes, footer included, are damaged, and files with unusual columns."""

    name = "parquet"

    def __init__(self, folder: Path) -> None:
        self._path = folder / "case.parquet"
        self._files = [self._bytes(rows, pressed) for rows in _TABLES for pressed in ("none", "snappy", "zstd")]

    @staticmethod
    def _bytes(rows: list[dict[str, object]], compression: str) -> bytes:
        out = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), out, compression=compression)
        return out.getvalue()

    def make(self, rng: random.Random) -> None:
        data = rng.choice(self._files)
        for _ in range(rng.randint(1, 3)):
            data = flipped(rng, data)  # larger damage is found at the first look
        if rng.random() < 0.2:
            data = damaged(rng, data)
        if rng.random() < 0.7 and not data.endswith(b"PAR1"):
            data += b"PAR1"  # otherwise most cases end at the first check
        self._path.write_bytes(data)

    def read(self) -> None:
        column_values(self._path, "extra_info.index")
        rows = read_file(self._path, Keys())
        for i in range(len(rows)):
            rows.row(i)

    def close(self) -> None:
        pass


_TABLES: list[list[dict[str, object]]] = [
    [{"prompt": f"{i}+1=", "answer": str(i + 1), "extra_info": {"index": i}} for i in range(20)],
    [{"prompt": [{"role": "user", "content": "x" * i}], "answer": None, "bytes": b"\xff", "n": i} for i in range(1, 9)],
]


def lookup(key: str, depth: int = 1, tags: list[str] | None = None, how: dict[str, float] | None = None) -> str:
    """Look something up.

    Args:
        key: what to look for
    """
    return key * depth + str(tags) + str(how)


CALLS = (
    'Now.<tool_call>\n{"name": "lookup", "arguments": {"key": "a", "depth": 2}}\n</tool_call>\n',
    '<think>hm <tool_call>{"name": "x"}</tool_call></think><tool_call>{"name": "lookup", "arguments": ""}</tool_call>',
    '<|python_tag|>{"name": "lookup", "parameters": {"key": "b"}}; {"name": "lookup", "parameters": {"depth": "3"}}',
    '[TOOL_CALLS][{"name": "lookup", "arguments": {"tags": ["a"]}}]',
    "[TOOL_CALLS]lookup[CALL_ID]abc[ARGS]{}",
    "<tool_call><function=lookup><parameter=key>\nq\n</parameter><parameter=depth>2</parameter></function></tool_call>",
    "the sum is @lookup(1+(2*3)) and @lookup(",
)


class ToolTexts:
    """Turns of a model with tool calls, and the answers of tools' processes."""

    name = "tools"

    def __init__(self, folder: Path) -> None:
        self._text, self._answer, self._value = "", b"", object()
        self._tool = Tool.of(function_schema(lookup, "case.py:lookup"))

    def make(self, rng: random.Random) -> None:
        turn = rng.choice(CALLS) + rng.choice(CALLS)
        if rng.random() < 0.5:
            call = json.dumps(changed(rng, {"name": "lookup", "arguments": {"key": "a", "depth": 2, "tags": ["x"]}}))
            turn = rng.choice(("<tool_call>{}</tool_call>", "{}", "[TOOL_CALLS][{}]", "lookup[ARGS]{}")).replace(
                "{}", call
            )
        self._text = damaged(rng, turn.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogateescape")
        self._value = changed(rng, {"value": "4", "rows": [1, 2.0, None], "b": "x"})
        self._answer = damaged(rng, json.dumps(self._value).encode() + b"\n")

    def read(self) -> None:
        for parser in PARSERS.values():
            for call in parser(self._text).calls:
                json.dumps(call.as_message())
                self._convert(call.arguments)
        as_text(self._value, 256).encode()
        if self._answer:
            str(_answer(self._answer, 0)).encode("utf-8", "backslashreplace")

    def _convert(self, arguments: object) -> None:
        try:
            json.dumps(self._tool.arguments(arguments))  # type: ignore[arg-type]
        except WrongArguments as wrong:
            as_text(str(wrong), 256)

    def close(self) -> None:
        pass
