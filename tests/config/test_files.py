"""Files that are not configs: each gets a clear message, and none a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Diagnostic


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only_problem(path: Path | str) -> Diagnostic:
    (found,) = compile_config(None, [path], environ={}).diagnostics
    return found


def test_invalid_utf_8_is_shown_at_its_byte(folder: Path) -> None:
    (folder / "x.toml").write_bytes(b"[run]\nname = 'ok'\nseed = \xff1\n")
    found = only_problem("x.toml")
    assert (found.code, str(found.span), found.found) == ("E004", "x.toml:3:8", "byte 0xff")


def test_a_directory_names_the_files_in_it(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "a.toml").write_text("")
    found = only_problem("configs")
    assert (found.code, found.fix) == ("E002", "name a file in it (a.toml)")


def test_a_missing_file_suggests_its_neighbour(folder: Path) -> None:
    (folder / "train.toml").write_text("")
    found = only_problem("trian.toml")
    assert (found.code, found.fix) == ("E001", 'did you mean "train.toml"?')


def test_an_empty_file_is_a_warning_and_not_an_error(folder: Path) -> None:
    (folder / "x.toml").write_text("")
    compilation = compile_config(None, ["x.toml"], environ={})
    assert (compilation.ok, [each.code for each in compilation.diagnostics]) == (True, ["W008"])


def test_ten_megabytes_are_refused_before_they_are_parsed(folder: Path) -> None:
    (folder / "big.toml").write_bytes(b"[run]\n" + b"seed = 1\n" * 1_200_000)
    found = only_problem("big.toml")
    assert (found.code, found.allowed) == ("E005", "at most 1 MiB")


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 9000, "[" + ".".join("a" * 3000) + "]\n", "a" + ".a" * 3000 + " = 1\n"]
)
def test_deep_nesting_is_reported_at_the_place_where_it_gets_too_deep(folder: Path, text: str) -> None:
    (folder / "deep.toml").write_text(text)
    assert only_problem("deep.toml").code in ("E007", "E006")


def test_a_file_without_permission_or_that_is_no_file_is_reported(folder: Path) -> None:
    found = only_problem("/dev/null/x.toml")
    assert found.code in ("E001", "E003")


def test_a_byte_order_mark_is_accepted(folder: Path) -> None:
    (folder / "x.toml").write_bytes(b"\xef\xbb\xbf[run]\nseed = 4\n")
    assert compile_config(None, ["x.toml"], environ={}).draft.run.seed == 4


def test_carriage_returns_do_not_move_columns(folder: Path) -> None:
    (folder / "x.toml").write_bytes("[run]\r\ndir = 'é'\r\n[actor]\r\nlr = 'é'\r\n".encode())
    found = only_problem("x.toml")
    assert found.span is not None
    assert (str(found.span), found.span.text) == ("x.toml:4:6", "lr = 'é'")


def test_a_missing_base_is_reported_where_it_is_named(folder: Path) -> None:
    (folder / "x.toml").write_text('extends = "gone.toml"\n')
    found = only_problem("x.toml")
    assert (found.code, str(found.span)) == ("E001", "x.toml:1:11")
