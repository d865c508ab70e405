"""Rows of files and of the hub: columns found by themselves, and the line to write when they are not."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tqppo.data.dataset import load
from tqppo.data.files import hub_rows, missing
from tqppo.data.layout import Keys, text_of
from tqppo.errors import DataError, PreflightError, UsageError

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def _file(folder: Path, *rows: dict[str, object], name: str = "a.jsonl") -> str:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / name)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CHAT[:1], "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}},
        {"prompt": CHAT[:1], "solution": "4", "index": 3},
        {"question": [CHAT[0]], "answer": "4", "index": 3},
        {"problem": CHAT[:1], "answer": "4", "index": 3},
        {"messages": CHAT, "index": 3},
    ],
)
def test_the_columns_of_verl_trl_and_chats_are_found(tmp_path: Path, row: dict[str, object]) -> None:
    found = load(_file(tmp_path, row)).row(0)
    assert (found.prompt, found.answer, found.source) == (CHAT[:1], "4", "a")
    assert found.extra == {"index": 3}


def test_columns_that_cannot_be_found_come_with_the_line_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'a\.jsonl:1: no column looks like a prompt; .* data\.prompt_key = "text"'):
        load(_file(tmp_path, {"text": "2+2?", "answer": "4"}))
    with pytest.raises(DataError, match=r'no column looks like a reference answer.*data\.answer_key = ""'):
        load(_file(tmp_path, {"prompt": "2+2?", "score": 1}))
    assert load(_file(tmp_path, {"prompt": "2+2?", "score": 1}), keys=Keys(answer="")).row(0).answer is None


def test_the_first_row_decides_and_a_later_one_that_differs_is_named(tmp_path: Path) -> None:
    file = _file(tmp_path, {"question": "a", "answer": "b"}, {"prompt": "a", "answer": "b"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: no column 'question'"):
        load(file)


def test_a_pattern_joins_its_files_and_each_is_its_own_source(tmp_path: Path) -> None:
    for name in ("b", "a"):
        _file(tmp_path, {"prompt": name, "answer": name}, name=f"{name}.jsonl")
    rows = load(f"{tmp_path}/*.jsonl")
    assert [(rows.row(i).prompt, rows.row(i).source) for i in range(len(rows))] == [("a", "a"), ("b", "b")]
    assert rows.where(1).endswith("b.jsonl:1")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path, {}, name="trian.jsonl")
    assert missing("train.jsonl") == (
        f"data file train.jsonl does not exist; looked for {tmp_path}/train.jsonl; in that folder: trian.jsonl"
    )
    assert f"there is no folder {tmp_path}/data" in missing("data/train.jsonl")
    assert missing("data/gsm8k/train.parquet").endswith("; to make it: tqppo data get gsm8k")
    assert missing("*.csv") == f"no file matches *.csv; looked for {tmp_path}/*.csv"
    assert missing(str(tmp_path)).endswith(f"name its files, such as {tmp_path}/*.jsonl")


class Rows(list[dict[str, object]]):
    """A loaded dataset, as far as tqppo uses it."""

    _fingerprint = "f00"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A hub with one dataset; the list has what was asked for."""
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> Rows:
        asked.append((name, subset, split))
        if name != "openai/gsm8k":
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nmore")
        return Rows([{"question": "2+2?", "answer": "#### 4"}])

    module = ModuleType("datasets")
    module.__dict__.update(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=RuntimeError))
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_dataset_of_the_hub_has_rows_like_a_file(hub: list[tuple[object, ...]]) -> None:
    rows = load("hub:openai/gsm8k:main")
    assert (rows.row(0).prompt, rows.row(0).answer, rows.row(0).source) == ("2+2?", "#### 4", "openai/gsm8k")
    assert rows.where(0) == "hub:openai/gsm8k:main[0]"
    load("hub:openai/gsm8k@validation", held_out=True)
    load("hub:openai/gsm8k", held_out=True)
    splits = [("main", "train"), (None, "validation"), (None, "test")]
    assert hub == [("openai/gsm8k", *each) for each in splits]


def test_a_hub_that_cannot_be_reached_is_one_line(
    hub: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PreflightError, match=r"Couldn't reach 'a/b' on the Hub\. HF_HUB_OFFLINE is set") as caught:
        load("hub:a/b")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="name, subset, split"):
        hub_rows("hub:", Keys(), held_out=False)


def test_without_the_package_the_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PreflightError, match=r"pip install 'tqppo\[hub\]'"):
        load("hub:openai/gsm8k")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": None}], "message 1: its content is None; both must be text"),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": 5}], "message 2: its content is 5"),
        ([{"role": None, "content": "hi"}], "message 1: its role is None"),
        ([{"role": "user", "content": {"a": 1}}], "message 1: its content is {'a': 1}"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1: its content is "),
        ([{"role": "user", "content": [None]}], "message 1: its content is "),
    ],
)
def test_a_message_without_text_is_named_with_its_row_and_column(
    tmp_path: Path, messages: list[dict[str, object]], message: str
) -> None:
    path = _file(tmp_path, {"prompt": CHAT[:1], "answer": "4"}, {"prompt": messages, "answer": "4"})
    with pytest.raises(DataError, match=re.escape(f"a.jsonl:2: column 'prompt', {message}")):
        load(path)


def test_parts_of_text_and_calls_of_tools_are_messages(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    tool = {"role": "tool", "content": "4"}
    found = load(_file(tmp_path, {"prompt": [parts, call, tool], "answer": "4"})).row(0)
    assert isinstance(found.prompt, list)
    assert [text_of(message) for message in found.prompt] == ["2+2?", "", "4"]


def _parquet(path: Path, **columns: object) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_bytes_in_a_column_are_refused_with_row_and_column(tmp_path: Path) -> None:
    import pyarrow

    text = ["a", "b"]
    for value in (pyarrow.array([None, b"hi"]), pyarrow.array([[], [b"hi"]]), pyarrow.array([None, {"x": b"hi"}])):
        rows = load(_parquet(tmp_path / "a.parquet", prompt=text, answer=text, image=value))
        assert rows.row(0).answer == "a"
        with pytest.raises(DataError, match=r"a\.parquet:row 2: column 'image' holds bytes"):
            rows.row(1)


def test_text_of_a_parquet_file_that_is_not_utf_8_is_refused_with_its_row(tmp_path: Path) -> None:
    import pyarrow

    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff\xfe"]).buffers())
    with pytest.raises(DataError, match=r"a\.parquet:row 1: a text column is not UTF-8"):
        load(_parquet(tmp_path / "a.parquet", prompt=broken, answer=["a"]))
