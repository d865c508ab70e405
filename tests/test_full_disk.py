"""A full disk is an error with figures, or is passed over, for everything that a run writes; never a killed process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from disks import can_mount
from full_disk import WRITERS

SCRIPT = Path(__file__).with_name("full_disk.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    command = ["unshare", "-m", sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("disks"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line)


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root, for file systems of 1 MiB")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_and_costs_nothing_that_is_there(outcomes: dict[str, str], writer: str) -> None:
    said = outcomes[writer]
    assert said == "ok", ast.literal_eval(said)
