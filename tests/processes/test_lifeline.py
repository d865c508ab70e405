"""Processes that must not outlive their owner, on real processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tqppo.processes import lifeline, reaper
from tqppo.processes.reaper import claim
from tqppo.space import SHARED_MEMORY

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
FAMILY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
OWNER = """
import os, subprocess, sys, time
from tqppo.processes import lifeline, reaper
from tqppo.processes.reaper import claim
watcher = lifeline.Watcher([sys.argv[1] + "/left-*"])
command = [sys.executable, "-c", sys.argv[2]]
family = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
grandchild = family.stdout.readline().strip()
watcher.watch(lifeline.descendants(os.getpid()))
print(family.pid, grandchild, flush=True)
if sys.argv[3] == "close":
    watcher.close()
    print("closed", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python code in a process of its own, which is killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True))
        return started[-1]

    yield start
    lifeline.end([process.pid for process in started])
    for process in started:
        process.communicate()


def line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.02)
    return False


def test_descendants_are_found_at_every_depth(start: Callable[..., subprocess.Popen[str]]) -> None:
    family = start(FAMILY)
    (grandchild,) = line(family)
    assert lifeline.descendants(family.pid) == [grandchild]
    assert {family.pid, grandchild} <= set(lifeline.descendants(os.getpid()))


def test_end_kills_a_process_and_a_child_that_ignores_sigterm(start: Callable[..., subprocess.Popen[str]]) -> None:
    family = start(FAMILY)
    (grandchild,) = line(family)
    lifeline.end([family.pid], grace_s=5.0)
    assert family.wait() == -signal.SIGTERM, "SIGTERM was enough for the parent"
    assert not is_alive(grandchild)


def test_end_waits_no_longer_than_its_grace(start: Callable[..., subprocess.Popen[str]]) -> None:
    stubborn = start(STUBBORN)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    before = time.monotonic()
    lifeline.end([stubborn.pid], grace_s=0.3)
    assert stubborn.wait() == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - before < 5


def test_end_of_a_process_that_is_gone_returns_at_once(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("pass")
    process.wait()
    lifeline.end([process.pid], grace_s=60.0)


def test_a_process_dies_with_its_killed_parent(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = "import os, sys, time; from tqppo.processes.lifeline import die_with_parent\n"
    child += "die_with_parent(int(sys.argv[1])); print('up', flush=True); time.sleep(600)"
    parent = start(
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    (pid,) = line(parent)
    parent.kill()
    assert gone(pid)


def test_a_process_whose_parent_was_gone_before_it_asked_is_killed(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("from tqppo.processes.lifeline import die_with_parent; die_with_parent(1); print('alive')")
    assert process.wait() == -signal.SIGKILL


def test_a_killed_owner_takes_its_watched_processes_and_its_folders_with_it(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "left-1").mkdir()
    (tmp_path / "kept").mkdir()
    owner = start(OWNER, tmp_path, FAMILY, "stay")
    pids = line(owner)
    assert all(map(is_alive, pids))
    owner.kill()
    assert gone(*pids)
    deadline = time.monotonic() + 10
    while (tmp_path / "left-1").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_watcher_that_is_closed_has_removed_what_its_owner_left(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "left-1").mkdir()
    owner = start(OWNER, tmp_path, FAMILY, "close")
    pids = line(owner)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "closed\n"
    assert not (tmp_path / "left-1").exists()
    assert not any(map(is_alive, pids))
    assert owner.poll() is None


def guard(tmp_path: Path, code: str, *, grace_s: float = 1.0) -> subprocess.Popen[str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        lifeline.guard_command(command, remove=[str(scratch)], grace_s=grace_s, log=str(tmp_path / "log")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_guard_whose_pipe_closes_ends_its_command_and_reports_the_exit_code(tmp_path: Path) -> None:
    process = guard(tmp_path, FAMILY)
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.02)
    below = lifeline.descendants(process.pid)
    assert len(below) == 2, "the command and its child"
    out, _ = process.communicate()
    assert int(out) == -signal.SIGTERM
    assert not any(map(is_alive, below))
    assert not (tmp_path / "scratch").exists()


def test_a_guard_whose_command_ends_kills_the_orphans_of_the_command(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    process = guard(tmp_path, code + " start_new_session=True).pid); sys.exit(7)")
    assert process.stdout is not None
    assert process.stdout.read() == "7\n"
    assert gone(int((tmp_path / "log").read_text()))
    process.communicate()


def test_a_guard_leaves_no_file_of_its_command_in_shared_memory(tmp_path: Path) -> None:
    name = f"/dev/shm/psm_lifeline_{os.getpid()}"
    process = guard(tmp_path, f"import time; file = open({name!r}, 'w'); print('up', flush=True); time.sleep(600)")
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.02)
    process.communicate()
    assert not Path(name).exists()


def test_a_command_dies_with_a_guard_that_is_killed(tmp_path: Path) -> None:
    process = guard(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.02)
    (command,) = lifeline.descendants(process.pid)
    process.kill()
    assert gone(command)
    process.communicate()


def test_the_script_and_the_package_mean_the_same_shared_memory() -> None:
    assert f"{SHARED_MEMORY}/" == lifeline.SHARED


def test_folders_of_live_processes_are_left_alone(tmp_path: Path) -> None:
    mine, dead = claim(tmp_path / "tqppo-mine"), tmp_path / "tqppo-dead"
    dead.mkdir()
    (dead / reaper.LOCK).touch()
    (dead / "data").write_bytes(b"1")
    (tmp_path / "tqppo-begun").mkdir()  # its process has not locked it yet
    owner = subprocess.Popen(lifeline.guard_command(reap=[str(tmp_path / "tqppo-*")]), stdin=subprocess.PIPE)
    owner.communicate(timeout=20)
    assert not dead.exists()
    assert mine.folder.exists()
    assert (tmp_path / "tqppo-begun").exists()
    mine.release()
    assert lifeline.LOCK == reaper.LOCK
