"""Data files of every format as rows with their places, and the files that a pattern stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tqppo import tables
from tqppo.errors import DataError


def test_json_csv_and_jsonl_give_the_same_rows_each_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "x"}\n\n{"q": "y"}\n')
    (tmp_path / "a.json").write_text('[{"q": "x"}, {"q": "y"}]')
    (tmp_path / "b.json").write_text('{"version": 1, "data": [{"q": "x"}, {"q": "y"}]}')
    (tmp_path / "a.csv").write_text('q\nx\n"y"\n', encoding="utf-8-sig")
    found = {name: tables.read(tmp_path / name) for name in ("a.jsonl", "a.json", "b.json", "a.csv")}
    assert {str([row for _, row in rows]) for rows in found.values()} == {"[{'q': 'x'}, {'q': 'y'}]"}
    last = {name: rows[-1][0].removeprefix(f"{tmp_path}/") for name, rows in found.items()}
    assert last == {"a.jsonl": "a.jsonl:3", "a.json": "a.json[1]", "b.json": "b.json[1]", "a.csv": "a.csv:3"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"q": "x"}', r"a\.json: expected a JSON list of rows.*\.jsonl"),
        ("a.json", "[1]", r"a\.json\[0\]: expected a JSON object"),
        ("a.json", "[{]", r"a\.json: not valid JSON"),
        ("a.csv", "a,b\n1\n", r"a\.csv:2: the row has more or fewer cells than the header, which names a, b"),
        ("a.csv", "a,b\n1,2,3\n", r"a\.csv:2: the row has more or fewer cells"),
        ("a.csv", 'a\n"open\n', r"a\.csv:1: not valid CSV"),
        ("a.txt", "x", r"expected \.jsonl"),
        ("a.jsonl", '{"q": 1}\n{"q": "\\ud800"}', r"a\.jsonl:2: column 'q' holds half of a character"),
        ("a.jsonl", '{"q": [{"a": "x\\uDFFFx"}]}', r"a\.jsonl:1: column 'q' holds half of a character"),
        ("a.jsonl", '{"\\ud83d": 1}', r"a\.jsonl:1: the name of a column holds half of a character"),
        ("a.json", '[{"q": 1}, {"q": "\\ud800"}]', r"a\.json\[1\]: column 'q' holds half of a character"),
        (
            "a.jsonl",
            '{"q": ' + "[" * 1000 + "]" * 1000 + "}",
            r"a\.jsonl:1: not valid JSON: nested more than 100 levels",
        ),
        ("a.jsonl", '{"q": ' + "[" * 100_000, r"a\.jsonl:1: not valid JSON: nested more than 100"),
        ("a.jsonl", '{"q": ' + "9" * 5000 + "}", r"a\.jsonl:1: not valid JSON"),
    ],
)
def test_a_broken_place_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        tables.read(tmp_path / name)


def test_a_pattern_stands_for_its_files_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "[x].jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert [path.name for path in tables.expand(f"{tmp_path}/?.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in tables.expand(f"{tmp_path}/[x].jsonl")] == ["[x].jsonl"]
    assert tables.expand(f"{tmp_path}/none*.jsonl") == tables.expand(f"{tmp_path}/none.jsonl") == []


def test_whole_characters_beyond_the_first_plane_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "\\ud83d\\ude42"}\n')
    assert tables.read(tmp_path / "a.jsonl") == [(f"{tmp_path}/a.jsonl:1", {"q": "🙂"})]


def test_a_pipe_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert tables.expand(str(tmp_path / "a.jsonl")) == tables.expand(str(tmp_path / "*.jsonl")) == []
    assert tables.expand("x" * 5000) == tables.expand("a\0b") == tables.expand("~no-such-user-at-all/a") == []
