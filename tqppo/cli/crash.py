"""Reports an unexpected error: a short message on stderr, and the traceback in a file."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from types import TracebackType

from tqppo.cli.output import say


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A replacement for `sys.excepthook`; the interpreter then exits with 1."""
    lines = traceback.format_exception(kind, error, trace)
    handle, path = tempfile.mkstemp(prefix="tqppo-crash-", suffix=".log")
    with os.fdopen(handle, "w") as out:
        out.write(f"command: {' '.join(sys.argv)}\n\n{''.join(lines)}")
    summary = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()[-1]
    say(
        f"error: unexpected error, probably a bug in tqppo: {summary}\n"
        f"The traceback is in {path}; please report it with the output of `tqppo env`.",
        err=True,
    )
