"""Files with their bases, in the order in which they are merged, and what can be wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.diagnostics import Span
from tqppo.config.read.files import FileReader, syntax_fix
from tqppo.config.read.layers import read_layers


def test_a_file_comes_after_the_files_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[run]\nseed = 1\n")
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[run]\nseed = 2\n')
    reader = FileReader({})
    reader.file(tmp_path / "mine.toml", "config")
    assert [Path(layer.source).name for layer in reader.layers] == ["base.toml", "mine.toml"]
    assert not reader.problems


def test_a_file_that_cannot_be_read_is_a_problem_at_the_extends_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "none.toml"\n[run]\nseed = 2\n')
    reader = FileReader({})
    reader.file(tmp_path / "mine.toml", "config")
    (problem,) = reader.problems
    assert (problem.code, problem.key) == ("E001", "extends")
    assert problem.span is not None
    assert problem.span.line == 1


@pytest.mark.parametrize("table", ["[extends]", "[extends.a]", "[[extends]]"])
def test_an_extends_that_is_a_table_is_a_problem_at_its_header(tmp_path: Path, table: str) -> None:
    (tmp_path / "mine.toml").write_text(f"{table}\nseed = 2\n")
    reader = FileReader({})
    reader.file(tmp_path / "mine.toml", "config")
    (problem,) = reader.problems
    assert (problem.code, problem.span and problem.span.line) == ("E011", 1)


def test_layers_come_in_the_order_in_which_later_ones_win(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[run]\nseed = 1\n")
    layers, problems = read_layers("quickstart", [tmp_path / "a.toml"], ["run.seed=3"], {"TQPPO__RUN__SEED": "2"})
    assert [layer.kind for layer in layers][-3:] == ["config", "environment", "set"]
    assert {layer.kind for layer in layers[:-3]} == {"preset"}
    assert not problems


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("[actor", "write a table's name in brackets, alone on its line: [actor]"),
        ("lr", "write key = value"),
        ("shuffle = True", "write true"),
        ("path = none-of-it", 'a string needs quotes: path = "none-of-it"'),
        ("x = null", "TOML has no null: delete the line to use the default"),
    ],
)
def test_common_syntax_errors_have_a_fix(line: str, fix: str) -> None:
    assert syntax_fix(Span("x.toml", 1, 1, 1, line)) == fix
