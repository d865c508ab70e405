"""Nothing is lost, whichever line of our code a run is ended at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("moments.py")


def ended_at(folder: Path, how: str, stride: int, first: int) -> list[str]:
    """What the script says, line by line: problems, and a count at the end of each trial."""
    command = [sys.executable, str(SCRIPT), str(folder), how, str(stride), str(first)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "first"), [("kill", 3), ("ctrl-c", 47)])
def test_a_run_that_is_ended_at_some_lines_is_resumed_to_the_same_bytes(tmp_path: Path, how: str, first: int) -> None:
    said = ended_at(tmp_path, how, 97, first)
    assert [line.partition(":")[0] for line in said] == ["train", "background", "resume"], "\n".join(said)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["kill", "ctrl-c"])
def test_a_run_that_is_ended_at_any_line_is_resumed_to_the_same_bytes(tmp_path: Path, how: str) -> None:
    said = ended_at(tmp_path, how, 3, 1)
    assert [line.partition(":")[0] for line in said] == ["train", "background", "resume"], "\n".join(said)
