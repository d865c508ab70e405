"""Colour is for terminals, and only where it is welcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest

Run = Callable[..., Any]
TQPPO = str(Path(sys.executable).with_name("tqppo"))
COMMANDS = [["presets", "list"], ["backends", "list"], ["validate-config", "--preset", "quickstart", "--set", "a.b=1"]]


def at_a_terminal(arguments: list[str], folder: Path, **environ: str) -> str:
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "xterm-256color"}
    return pexpect.run(
        f"{TQPPO} {' '.join(arguments)}", cwd=str(folder), env={**clean, **environ}, encoding="utf-8", timeout=60
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_terminal_gets_colour(command: list[str], tmp_path: Path) -> None:
    assert "\x1b[" in at_a_terminal(command, tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_color_is_respected(command: list[str], tmp_path: Path) -> None:
    shown = at_a_terminal(command, tmp_path, NO_COLOR="1")
    assert "\x1b[3" not in shown
    assert "\x1b[9" not in shown


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_pipe_gets_plain_lines(command: list[str], tqppo: Run) -> None:
    answer = tqppo(*command)
    assert "\x1b" not in answer.out + answer.err
    assert not set("─│┃━┏╭") & set(answer.out + answer.err)
