"""A run whose driver is killed a dozen times, saves included, ends in the bytes of one that never was."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import MODES

SCRIPT = Path(__file__).with_name("kills.py")


def killed(folder: Path, mode: str, where: str, kills: int) -> list[str]:
    """What the script says, line by line: where each kill came, and how it ended."""
    command = [sys.executable, str(SCRIPT), str(folder), mode, where, str(kills), str(seed := random.randrange(10**6))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"seed {seed}\n{ended.stdout}{ended.stderr}"
    said = ended.stdout.splitlines()
    assert said[-1] == "resumed to the end: 0, the same bytes", f"seed {seed}\n{ended.stdout}{ended.stderr}"
    return said[:-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_a_step_and_in_a_save_ends_in_the_same_bytes(tmp_path: Path) -> None:
    said = killed(tmp_path, "ppo", "alone", 2)
    assert [each.partition(" ")[0] for each in said] == ["killed", "killed"]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("where", ["alone", "simple", "ray"])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_run_that_is_killed_a_dozen_times_ends_in_the_same_bytes(tmp_path: Path, mode: str, where: str) -> None:
    said = killed(tmp_path, mode, where, 12)
    assert sum("in a save" in each for each in said) >= 4
    assert sum("in a step" in each for each in said) >= 3
