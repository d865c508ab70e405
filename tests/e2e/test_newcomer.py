"""The first hour of a newcomer, as `newcomer.py` has it, ends with a model that answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("newcomer.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_mistakes_five_messages_then_a_trained_model(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
