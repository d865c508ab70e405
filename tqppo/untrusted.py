"""Files and texts from outside, which may be hostile: data, models, checkpoints from elsewhere, what a model says.

Files are read up to a limit, text is printed without anything that a terminal obeys, names stay inside their folder.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqppo.errors import PreflightError, TqppoError

# Control characters but for line break and tab, marks that turn the direction of text around, and lone surrogates.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")

FOLDER_NAMES = "letters, digits and . _ + -, not beginning with . or -"
MAX_DEPTH = 100  # of lists and tables in one another


class TooLarge(OSError):
    """A file has more bytes than its reader takes."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """All bytes of a regular file. OSError for devices and pipes, which may never end; `TooLarge` for more bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise TooLarge(0, f"it has more than {max_bytes} bytes", str(path))
    return data


def read_json(path: Path, max_bytes: int) -> object:
    """The JSON value in a file. ValueError if it is none, OSError as of `read_file`."""
    return parse_json(read_file(path, max_bytes))


def parse_json(text: bytes) -> object:
    """A JSON value. ValueError for anything else, also for lists that are nested too deeply for other code."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def is_deep(value: object) -> bool:
    """Whether lists and tables are nested more than `MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        tables = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not tables:
            return False
        level = [inner for table in tables for inner in table]
    return True


def printable(text: str) -> str:
    r"""The text with everything that a terminal would obey instead of showing it as an escape such as `\x1b`."""
    return text if text.isprintable() else _OBEYED.sub(_escaped, text)


def printable_json(text: str) -> str:
    r"""A JSON text, which stays one: what a terminal would obey is `\u009b`."""
    return text if text.isprintable() else _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn whatever a library raises on a damaged or unknown model into a `PreflightError` that says what it was.

    Libraries trust these files: a number where a list belongs is a TypeError deep inside of them. A full memory is no
    fault of the files, and stays what it is.
    """
    try:
        yield
    except (TqppoError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which this floor does not import
            raise
        lines = [line.strip() for line in str(error).strip().splitlines()]
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise PreflightError(f"{what} cannot be loaded: {kind}{printable(' '.join(lines[:2]))[:400]}") from error


def is_folder_name(name: str) -> bool:
    """Whether a text can be the name of one folder everywhere: no path, nothing hidden, nothing to quote."""
    return _FOLDER_NAME.fullmatch(name) is not None
