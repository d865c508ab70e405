"""Files that are not configs: each gets a clear message, and none a traceback."""

from __future__ import annotations

import os
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


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["/dev/zero", "pipe.toml", "loop.toml", "./" + "x" * 5000 + ".toml"])
def test_a_base_that_never_ends_or_cannot_be_opened_is_named_at_once(folder: Path, name: str) -> None:
    os.mkfifo(folder / "pipe.toml")
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "x.toml").write_text(f'extends = "{name}"\n')
    found = only_problem("x.toml")
    assert (found.code, str(found.span)) == ("E003", "x.toml:1:11")
    assert len(found.message) < 400
    assert only_problem(Path(name)).code == "E003"


def test_a_base_with_an_impossible_or_overlong_name_is_no_preset(folder: Path) -> None:
    for name in ("a\\u0000b", "a\\u0000.toml", "x" * 100_000):
        (folder / "x.toml").write_text(f'extends = "{name}"\n')
        found = only_problem("x.toml")
        assert found.code == "E009"
        assert len(found.message) < 400


@pytest.mark.timeout(60)
def test_files_that_extend_each_other_without_end_are_read_a_hundred_times_at_most(folder: Path) -> None:
    """Forty files, each of which extends the next one twice, are 2^40 layers."""
    for number in range(40):
        (folder / f"f{number}.toml").write_text(f'extends = ["f{number + 1}", "f{number + 1}"]\n[run]\nseed = 1\n')
    (folder / "f40.toml").write_text("[run]\nseed = 1\n")
    (folder / "long.toml").write_text(f"extends = {['f40'] * 50_000}\n[run]\nseed = 1\n")
    for name in ("f0.toml", "long.toml"):
        found = only_problem(name)
        assert (found.code, found.message) == ("E014", "a config is made of more than 100 files")


@pytest.mark.timeout(60)
def test_a_file_with_thousands_of_mistakes_is_given_up_on(folder: Path) -> None:
    (folder / "x.toml").write_text("[run]\n" + "".join(f"key_{number} = 1\n" for number in range(50_000)))
    found = compile_config(None, ["x.toml"], environ={}).diagnostics
    assert [each.code for each in found].count("E101") == 200
    (last,) = [each for each in found if each.code == "E015"]
    assert str(last.span) == "x.toml:202:1"


@pytest.mark.timeout(60)
def test_places_in_a_long_line_are_those_of_its_characters(folder: Path) -> None:
    names = [f"ä{number}" for number in range(20_000)]
    (folder / "x.toml").write_text(f"[model]\nlora_targets = {[*names[:-1], 7]}\n".replace("'", '"'))
    found = only_problem("x.toml")
    assert (found.code, found.span and found.span.line) == ("E103", 2)
    assert found.span is not None
    assert found.span.text[found.span.column - 1 :] == "7]"


def test_a_number_with_thousands_of_digits_is_shown_at_its_line(folder: Path) -> None:
    (folder / "x.toml").write_text(f"[run]\nname = 'ok'\nseed = {'9' * 5000}\n")
    found = only_problem("x.toml")
    assert (found.code, str(found.span)) == ("E006", "x.toml:3:8")
    assert "too many digits" in found.message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('[data]\nsystem_prompt = "a\\u001b[2Jb"', r"it holds the control character \x1b"),
        ('[run]\ndir = "a\\u0000b"', r"it holds the control character \x00"),
        ('[rollout]\nagent_args = {a = ["\\u009b31m"]}', r"it holds the control character \x9b"),
        (f'[model]\npath = "{"x" * 300}"', "no file can have so long a name"),
        (f'[data]\ntrain = ["{"x/" * 3000}"]', "no file can have so long a name"),
        ('[model]\npath = "~no-such-user-at-all/model"', "there is no user ~no-such-user-at-all"),
        ("[actor]\nmicro_batch_tokens = 10000000000000000000", "a whole number has more than 64 bits"),
    ],
)
def test_values_that_can_be_neither_printed_nor_opened_are_refused(folder: Path, line: str, why: str) -> None:
    (folder / "x.toml").write_text(f"{line}\n")
    (found,) = [each for each in compile_config(None, ["x.toml"], environ={}).diagnostics if each.severity == "error"]
    assert found.code == "E108"
    assert found.message.endswith(f"cannot be used: {why}")
    assert found.span is not None
    assert found.span.line == 2
