"""One process at a time works on a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tqppo.errors import PreflightError
from tqppo.run.lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from tqppo.run.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_the_run(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(PreflightError) as refused, RunLock(tmp_path):
        pass
    assert f"is in use by process {holder.pid} on" in str(refused.value)
    holder.kill()
    holder.wait()


def test_a_killed_holder_s_lock_is_free_at_once(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / ".lock").read_text() == ""
    with RunLock(tmp_path):
        pass


def of_another_machine(folder: Path, *, age_s: float) -> None:
    holder = {"pid": 7, "host": "elsewhere", "since": "2026-01-01 00:00:00", "command": "tqppo train"}
    (folder / ".lock").write_text(json.dumps(holder))
    os.utime(folder / ".lock", (time.time() - age_s,) * 2)


def test_a_fresh_lease_of_another_machine_is_respected(tmp_path: Path) -> None:
    of_another_machine(tmp_path, age_s=5)
    with pytest.raises(PreflightError, match="process 7 on elsewhere"), RunLock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_lease_that_was_not_renewed_is_taken_over(tmp_path: Path) -> None:
    of_another_machine(tmp_path, age_s=120)
    with RunLock(tmp_path):
        pass


def test_the_lease_is_renewed_while_the_lock_is_held(tmp_path: Path) -> None:
    with RunLock(tmp_path, renew_s=0.02):
        os.utime(tmp_path / ".lock", (0, 0))
        deadline = time.monotonic() + 20
        while (tmp_path / ".lock").stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
