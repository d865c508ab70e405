"""One process at a time works on a run."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tqppo.errors import LockLost, OutOfSpace, PreflightError
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
    holder = {
        "pid": 7,
        "host": socket.gethostname(),  # two machines may have one name
        "since": "2026-01-01 00:00:00",
        "command": "tqppo train",
        "machine": "another",
        "token": "abc",
    }
    (folder / ".lock").write_text(json.dumps(holder))
    os.utime(folder / ".lock", (time.time() - age_s,) * 2)


def test_a_fresh_lease_of_another_machine_is_respected(tmp_path: Path) -> None:
    of_another_machine(tmp_path, age_s=5)
    with pytest.raises(PreflightError, match=r"process 7 on .*its lease ends 60 s after"), RunLock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("age_s", [120, -3600])  # an hour ahead: the clock was set back, and nothing renews it since
def test_a_lease_that_was_not_renewed_is_taken_over(tmp_path: Path, age_s: float) -> None:
    of_another_machine(tmp_path, age_s=age_s)
    with RunLock(tmp_path):
        pass


def test_the_lease_is_renewed_while_the_lock_is_held(tmp_path: Path) -> None:
    with RunLock(tmp_path, renew_s=0.02):
        os.utime(tmp_path / ".lock", (0, 0))
        deadline = time.monotonic() + 20
        while (tmp_path / ".lock").stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def no_flock(descriptor: int, kind: int) -> None:
    raise OSError(errno.ENOTSUP, "no locks on this file system")


def test_where_flock_is_refused_the_lease_keeps_processes_of_one_machine_apart_too(tmp_path: Path) -> None:
    with (
        RunLock(tmp_path, flock=no_flock),
        pytest.raises(PreflightError, match=f"process {os.getpid()} on"),
        RunLock(tmp_path, flock=no_flock),
    ):
        pass
    with RunLock(tmp_path, flock=no_flock):
        pass


def test_of_two_machines_that_take_the_lock_at_once_one_gets_it(tmp_path: Path) -> None:
    """Both find it free; the second writes its lease after the first, before the first reads its own back."""

    def meanwhile(descriptor: int, kind: int) -> None:
        threading.Timer(0.1, of_another_machine, [tmp_path], {"age_s": 0}).start()

    with pytest.raises(PreflightError, match="process 7 on"), RunLock(tmp_path, flock=meanwhile, settle_s=1.0):
        pass


def test_a_holder_that_lost_its_lease_stops_and_leaves_the_other_alone(tmp_path: Path) -> None:
    with RunLock(tmp_path, renew_s=0.02) as lock:
        lock.check()
        of_another_machine(tmp_path, age_s=30)  # it was stopped for so long that another machine took over
        stamp = (tmp_path / ".lock").stat().st_mtime
        with pytest.raises(LockLost, match="taken over by process 7 on"):
            lock.check()
        time.sleep(0.2)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == 7
    assert (tmp_path / ".lock").stat().st_mtime == stamp


def test_a_deleted_lock_file_is_made_again_unless_another_process_was_faster(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        (tmp_path / ".lock").unlink()
        lock.check()
        with pytest.raises(PreflightError, match="in use"), RunLock(tmp_path):
            pass
        (tmp_path / ".lock").unlink()
        with RunLock(tmp_path), pytest.raises(LockLost, match="taken over"):
            lock.check()


def test_a_stopped_holder_on_this_machine_keeps_its_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGSTOP)
    os.utime(tmp_path / ".lock", (0, 0))  # its lease ended long ago
    with pytest.raises(PreflightError, match="in use"), RunLock(tmp_path):
        pass
    holder.kill()
    holder.wait()


def test_a_forked_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    fork = """
    import os
    told, tell = os.pipe()
    if os.fork():
        os.read(told, 1)
        os._exit(0)
    os.write(tell, b"forked")
    time.sleep(60)"""
    script = HOLD.replace("\n    time.sleep(600)", fork)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, process_group=0)
    process.wait()
    try:
        with RunLock(tmp_path):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(PreflightError, match="cannot be opened for writing: Is a directory"), RunLock(tmp_path):
        pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(PreflightError, match="cannot be opened"), RunLock(tmp_path):
        pass
    assert precious.read_text() == "mine"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OutOfSpace, match=f"{tmp_path} has no room for"), RunLock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
