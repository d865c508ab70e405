"""Every row of the data has exactly one teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tqppo.config.checks import routing
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read import rows


def found(*sets: str, train: object = "task:sort") -> list[Diagnostic]:
    teachers = ("mode=distill", "teachers.a.path=a", 'teachers.a.match=["math"]')
    second = ("teachers.b.path=b", 'teachers.b.match=["code"]')
    return compile_config(None, [], [*teachers, *second, f"data.train={json.dumps(train)}", *sets], {}).diagnostics


def codes(*sets: str, train: object = "task:sort") -> list[str]:
    return [each.code for each in found(*sets, train=train)]


def write(path: Path, *columns: dict[str, object]) -> str:
    path.write_text("".join(json.dumps({"prompt": "1+1", **each}) + "\n" for each in columns))
    return str(path)


def test_tasks_and_files_are_looked_through_together(tmp_path: Path) -> None:
    math = write(tmp_path / "a.jsonl", {"data_source": "math"})
    code = write(tmp_path / "b.jsonl", {"data_source": "code"})
    assert codes(train=[math, code]) == []
    assert codes(train=[math, code, "task:sort"]) == ["E510"]
    assert codes('teachers.b.match=["code", "sort"]', train=[math, code, "task:sort"]) == []


def test_a_column_may_be_nested_in_extra_info_of_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    inner = [{"topic": "math", "level": 1}, {"topic": "code", "level": 2}]
    parquet.write_table(pa.table({"prompt": ["a", "b"], "extra_info": inner}), path)
    assert codes("distillation.route_by=topic", train=str(path)) == []
    (problem,) = found("distillation.route_by=level", train=str(path))[:1]
    assert (problem.code, '"1", "2"' in problem.message) == ("E510", True)


def test_rows_without_a_value_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"topic": "math"}, {"topic": ""}, {"topic": "code"}, {})
    (problem,) = found("distillation.route_by=topic", train=path)
    assert (problem.code, problem.message[:11]) == ("E512", "2 rows have")
    assert f"{path}:2, {path}:4" in problem.found
    table = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"prompt": ["a", "b", "c"], "topic": ["math", None, "code"]}), table)
    (problem,) = found("distillation.route_by=topic", train=str(table))
    assert f"nothing in {table}:row 2" in problem.found


def test_rows_of_a_file_without_sources_have_the_files_name(tmp_path: Path) -> None:
    math, code = write(tmp_path / "math.jsonl", {}), write(tmp_path / "code.jsonl", {})
    assert codes(train=[math, code]) == []


def test_rows_of_tasks_have_no_other_column_than_their_source() -> None:
    assert codes("distillation.route_by=topic")[:1] == ["E512"]


def test_a_single_teacher_without_match_takes_every_row(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"data_source": "anything"})
    assert compile_config(None, [], ["mode=distill", "teachers.a.path=a", f"data.train={path}"], {}).diagnostics == []


def test_a_large_file_is_looked_at_as_far_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [{"data_source": "math"}, {"data_source": "code"}] * 50
    path = write(tmp_path / "train.jsonl", *many, {"data_source": "chat"})
    monkeypatch.setattr(rows, "MAX_SCANNED_BYTES", 1000)
    monkeypatch.setattr(routing, "MAX_SCANNED_BYTES", 1000)
    assert codes(train=path) == ["W514"]
    table = tmp_path / "train.parquet"
    columns = {"prompt": ["a"] * 3, "data_source": ["math", "code", "chat"]}
    parquet.write_table(pa.table(columns), table, row_group_size=1)
    assert codes(train=str(table)) == ["E510"]
    monkeypatch.setattr(rows, "MAX_SCANNED_ROWS", 2)
    assert codes(train=str(table)) in (["E510"], ["W514"])  # a batch may hold more rows than the limit


def test_a_file_that_cannot_be_read_is_left_to_the_dataset(tmp_path: Path) -> None:
    broken = tmp_path / "train.parquet"
    broken.write_bytes(b"PAR1 but not really")
    assert codes(train=str(broken)) == []
    assert codes(train=str(tmp_path / "none.jsonl")) == []


def test_many_values_are_listed_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *({"data_source": f"s{i:02}"} for i in range(20)))
    problem = found(train=path)[0]
    assert '"s00", "s01"' in problem.message
    assert problem.message.endswith("and 12 more")
