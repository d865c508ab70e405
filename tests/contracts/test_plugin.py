"""The contract suites from the command line of pytest, as `tqppo backends check` starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_suite_without_the_name_of_a_back_end_says_what_is_missing(tmp_path: Path) -> None:
    suite = ["--pyargs", "tqppo.contracts.rollout", "-p", "tqppo.contracts.plugin", "-q", "-x"]
    command = [sys.executable, "-m", "pytest", *suite]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert "--backend NAME is missing" in done.stdout
