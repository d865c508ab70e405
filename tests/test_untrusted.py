"""Files that never end, text that a terminal obeys, names that leave their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tqppo.errors import DataError, PreflightError
from tqppo.untrusted import (
    MAX_DEPTH,
    TooLarge,
    is_folder_name,
    loading,
    parse_json,
    printable,
    printable_json,
    read_file,
)


def test_devices_pipes_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path, 100)
    assert not [
        each for each in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{each}") == "/dev/zero"
    ]


def test_a_file_is_read_up_to_its_limit_whatever_size_the_file_system_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    assert read_file(tmp_path / "file", 100) == bytes(100)
    for path in (tmp_path / "file", Path("/proc/self/status")):  # the size of the latter is said to be 0
        with pytest.raises(TooLarge, match="more than 99 bytes"):
            read_file(path, 99)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1_000, 200_000])
def test_json_that_is_nested_too_deeply_is_no_json(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_json(text.encode())
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert len(str(parse_json(json.dumps(["["] * 1000).encode()))) > 1000  # brackets within texts do not count


def test_what_a_terminal_obeys_is_escaped_and_everything_else_stays() -> None:
    hostile = "\x1b]0;title\x07 \x1b[2J\rover\x9b31m\x00 \u202eback \ud800"
    assert printable(hostile) == r"\x1b]0;title\x07 \x1b[2J\x0dover\x9b31m\x00 \u202eback \ud800"
    for text in ("two\nlines\tand a tab", "äöü 你好 🙂 →", ""):
        assert printable(text) == text


def test_json_for_a_terminal_stays_json() -> None:
    value = {"text": "\x1b[2J \x9b31m \x7f \ud800 ä"}
    text = printable_json(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(text) == value
    assert printable(text) == text
    assert "ä" in text


def test_a_name_is_that_of_one_visible_folder() -> None:
    assert all(map(is_folder_name, ("mine", "a.b_c+d-1", "_x")))
    hostile = ("", ".", "..", "../..", "a/b", "/a", ".hidden", "-rf", "a b", "a\n", "\x1b[2J", "a\0b", "é")
    assert not any(map(is_folder_name, hostile))


def test_what_a_library_raises_on_a_damaged_model_is_an_error_in_our_words() -> None:
    said = r"model 'm' cannot be loaded: TypeError: .*iterable"
    with pytest.raises(PreflightError, match=said), loading("model 'm'"):
        list(json.loads("1"))
    with pytest.raises(DataError, match="no rows"), loading("model 'm'"):
        raise DataError("no rows")
    with pytest.raises(MemoryError), loading("model 'm'"):
        raise MemoryError
