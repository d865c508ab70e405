"""One process at a time works on a run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from disks import files_of_at_most

from tqppo.errors import LockLost, OutOfSpace, PreflightError
from tqppo.run import lock as lock_module
from tqppo.run.lock import RunLock, is_held

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


def test_a_lock_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(PreflightError, match="is not a regular file"), RunLock(tmp_path):
        pass


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with files_of_at_most(10), pytest.raises(OutOfSpace, match=f"{tmp_path} has no room for"), RunLock(tmp_path):
        pass


# A machine of its own, on a mount whose flock does not leave the machine. It says "held" or "refused"; then, for every
# line of its input, "mine" or "lost".
MACHINE = """
import fcntl, os, sys
from pathlib import Path
from tqppo.errors import LockLost, PreflightError
from tqppo.run import lock
machine = Path(sys.argv[2])
lock._BOOT_ID = machine / "boot_id"
handle = os.open(machine / "flock", os.O_RDWR | os.O_CREAT)
flock = lambda _, kind: fcntl.flock(handle, kind)
times = {"renew_s": 0.05, "expires_s": float(sys.argv[3]), "settle_s": float(sys.argv[4])}
held = lock.RunLock(Path(sys.argv[1]), flock=flock, **times)
if len(sys.argv) > 5:
    sys.stdin.readline()
try:
    held.__enter__()
    print("held", flush=True)
except PreflightError:
    print("refused", flush=True)
for _ in sys.stdin:
    try:
        held.check()
        print("mine", flush=True)
    except (LockLost, OSError):
        print("lost", flush=True)
held.__exit__(None, None, None)
"""


class Machine:
    """A process on a machine of its own."""

    def __init__(self, run: Path, name: str, *, expires_s: float, settle_s: float = 0.1, waits: bool = False) -> None:
        place = run.parent / name
        place.mkdir()
        (place / "boot_id").write_text(name)
        command = [sys.executable, "-c", MACHINE, str(run), str(place), str(expires_s), str(settle_s)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([*command, *(["wait"] if waits else [])], text=True, **pipes)

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def asked(self) -> str:
        self.tell()
        return self.says()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def this_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boot_id").write_text("this")
    monkeypatch.setattr(lock_module, "_BOOT_ID", tmp_path / "boot_id")


def local(descriptor: int, kind: int) -> None:
    """The flock of a mount that other machines do not see."""


def taken_after(run: Path, expires_s: float) -> tuple[RunLock, float]:
    """The lock, tried until it is had, and how long that took."""
    began, lock = time.monotonic(), RunLock(run, expires_s=expires_s, settle_s=0.05, flock=local)
    while True:
        assert time.monotonic() - began < 60
        try:
            return lock.__enter__(), time.monotonic() - began
        except PreflightError:
            time.sleep(0.05)


@pytest.mark.usefixtures("this_is_another_machine")
def test_a_heartbeat_keeps_other_machines_away_and_silence_lets_them_in(tmp_path: Path) -> None:
    run, expires_s = tmp_path / "run", 2.0
    run.mkdir()
    holder = Machine(run, "first", expires_s=expires_s)
    try:
        assert holder.says() == "held"
        until = time.monotonic() + 1.5 * expires_s  # longer than a lease that nothing renews
        while time.monotonic() < until:
            with (
                pytest.raises(PreflightError, match=f"process {holder.process.pid} on .*its lease ends 2 s after"),
                RunLock(run, expires_s=expires_s, flock=local),
            ):
                pass
            time.sleep(0.1)
        assert holder.asked() == "mine"
        holder.process.send_signal(signal.SIGSTOP)
        lock, seconds = taken_after(run, expires_s)
        assert seconds > expires_s / 4  # its last heartbeat was a moment ago
        token = json.loads((run / ".lock").read_text())["token"]
        holder.process.send_signal(signal.SIGCONT)
        assert holder.asked() == "lost"
        holder.process.communicate(timeout=30)  # it ends by itself, and leaves the lock alone
        assert json.loads((run / ".lock").read_text())["token"] == token
        lock.check()
        lock.__exit__(None, None, None)
    finally:
        holder.end()


@pytest.mark.usefixtures("this_is_another_machine")
def test_a_machine_that_died_is_waited_for_as_long_as_its_lease(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    holder = Machine(run, "first", expires_s=2.0)
    try:
        assert holder.says() == "held"
    finally:
        holder.end()
    lock, seconds = taken_after(run, 2.0)
    assert seconds > 0.5
    lock.__exit__(None, None, None)


def test_of_several_machines_that_start_at_once_one_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    machines = [Machine(run, f"m{i}", expires_s=60, settle_s=0.5, waits=True) for i in range(4)]
    try:
        for machine in machines:
            machine.tell()
        said = [machine.says() for machine in machines]
        held = [machine for machine, says in zip(machines, said, strict=True) if says == "held"]
        assert [machine.asked() for machine in held].count("mine") == 1
    finally:
        for machine in machines:
            machine.end()


def test_a_signal_that_cuts_a_check_short_does_not_keep_the_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception of a signal may leave the check's own lock taken."""
    monkeypatch.setattr(lock_module, "JOIN_S", 0.5)
    with RunLock(tmp_path, renew_s=0.01) as lock:
        lock._checking.acquire()
        time.sleep(0.1)  # until the thread that renews the lease waits for it
        lock.check()
    lock._checking.release()
    assert (tmp_path / ".lock").read_text() == ""


def test_looking_at_a_lock_leaves_it_as_it_is(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    before = (tmp_path / ".lock").read_bytes()
    assert is_held(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == before
    holder.kill()
    holder.wait()
    assert not is_held(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_run_on_another_machine_is_held_while_its_lease_is_fresh_and_looking_does_not_end_it(tmp_path: Path) -> None:
    for age_s, held in ((5, True), (120, False)):
        of_another_machine(tmp_path, age_s=age_s)
        before = (tmp_path / ".lock").stat()
        assert is_held(tmp_path) is held
        after = (tmp_path / ".lock").stat()
        assert (after.st_size, after.st_mtime) == (before.st_size, before.st_mtime)


def test_a_folder_without_a_lock_file_or_with_nonsense_in_it_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    for nonsense in (b"", b"[" * 4000, b'{"pid": 1e999}', b"\xff"):
        (tmp_path / ".lock").write_bytes(nonsense)
        assert not is_held(tmp_path)
        with RunLock(tmp_path):
            assert is_held(tmp_path)
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert not is_held(tmp_path)


def test_a_process_that_only_looks_does_not_keep_another_from_starting(tmp_path: Path) -> None:
    looks = list[int]()

    def looked_at(descriptor: int, kind: int) -> None:
        """Another process looks at the first try."""
        looks.append(kind)
        if len(looks) == 1:
            raise BlockingIOError
        fcntl.flock(descriptor, kind)

    with RunLock(tmp_path, flock=looked_at):
        assert len(looks) == 2


def test_a_run_that_is_deleted_at_the_moment_that_it_is_locked_is_an_error_in_words(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()

    def deleted(descriptor: int, kind: int) -> None:
        shutil.rmtree(run)

    with pytest.raises(PreflightError, match="another process has just deleted"), RunLock(run, flock=deleted):
        pass
