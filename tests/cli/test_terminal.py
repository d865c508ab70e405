"""Colour is for terminals, and only where it is welcome."""

from __future__ import annotations

import os
import subprocess
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


def test_a_list_of_runs_is_whole_on_narrow_terminals(tmp_path: Path) -> None:
    names = ["quickstart-model-1118-202415-2", "sums"]
    for name in names:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.resolved.toml").write_text("[run]\nmax_steps = 400\n")
        (run / "metrics.jsonl").write_text('{"step": 123}\n')
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "xterm-256color", "NO_COLOR": "1"}
    for columns in (40, 80):
        listed = pexpect.run(
            f"{TQPPO} runs list", cwd=str(tmp_path), env=environ, encoding="utf-8", timeout=60, dimensions=(30, columns)
        )
        assert "…" not in listed
        for text in (*names, "failed", "123/400"):
            assert text in listed, (columns, listed)


def test_without_a_standard_output_a_command_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(f"{TQPPO} presets list >&-", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
