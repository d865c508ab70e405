"""Folders of dead processes go, folders of live ones stay, whatever their process ids are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tqppo.processes.reaper import GRACE_S, LOCK, claim, reap, remove
from tqppo.run.cluster import PRIVATE_PREFIX
from tqppo.weights import location

PREFIX = "tqppo-test-"


@contextlib.contextmanager
def owner(parent: Path, script: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that claims `tqppo-test-other` with a file in it, runs the script and waits to be killed."""
    lines = f"""
        import os, sys
        from pathlib import Path
        from tqppo.processes.reaper import claim
        held = claim(Path(sys.argv[1]) / "{PREFIX}other")
        (held.folder / "data").mkdir()
        (held.folder / "data" / "file").write_text("bytes")
        {script}
        print("ready", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(lines), str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 2 * GRACE_S,) * 2)


def test_a_folder_of_a_live_process_stays_and_goes_once_the_process_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        age(tmp_path / f"{PREFIX}other")
        assert reap(tmp_path, PREFIX) == []
        assert (tmp_path / f"{PREFIX}other" / "data" / "file").read_text() == "bytes"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert reap(tmp_path, PREFIX) == [f"{PREFIX}other"]
    assert list(tmp_path.iterdir()) == []


def can_have_processes_of_its_own() -> bool:
    command = ["unshare", "--pid", "--fork", "--kill-child", "true"]
    return shutil.which("unshare") is not None and not subprocess.call(command, stderr=subprocess.DEVNULL)


# What a run keeps in places that other containers share: the blocks of its queue, published weights, a Ray session.
CONTAINER = """
import importlib, os, sys
from pathlib import Path
from tqppo.processes.reaper import claim
from tqppo.run.cluster import PRIVATE_PREFIX
from tqppo.weights import location
parent = Path(sys.argv[1])
assert os.getpid() == 1
storage = importlib.import_module("tqppo_backends.storage.segments")
queue = storage.Segments.create("tqppo-queue-x", 1 << 20, str(parent))
(queue.folder / "live" / "block").touch()
weights, session = claim(parent / location.new_folder().name), claim(parent / f"{PRIVATE_PREFIX}1-ab")
for held in (weights, session):
    (held.folder / "data").touch()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_have_processes_of_its_own(), reason="needs root, for a namespace of process ids")
def test_live_runs_of_other_containers_are_left_alone_whatever_their_process_ids_are(tmp_path: Path) -> None:
    prefixes = ("tqppo-queue-", location.PREFIX, PRIVATE_PREFIX)
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", CONTAINER, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        for folder in tmp_path.iterdir():
            age(folder)
        assert [reap(tmp_path, prefix) for prefix in prefixes] == [[], [], []]
        assert len(list(tmp_path.rglob("data"))) == 2
        assert len(list(tmp_path.rglob("block"))) == 1
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while any(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        for prefix in prefixes:
            reap(tmp_path, prefix)


def test_a_process_does_not_reap_its_own_folders(tmp_path: Path) -> None:
    held = claim(tmp_path / f"{PREFIX}mine")
    assert reap(tmp_path, PREFIX) == []
    assert held.folder.stat().st_mode & 0o777 == 0o700
    held.release()
    assert list(tmp_path.iterdir()) == []
    held.release()


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    held = claim(tmp_path / f"{PREFIX}mine")
    with pytest.raises(FileExistsError):
        claim(held.folder)
    held.release()


def test_the_lock_is_not_inherited_by_programs_that_the_owner_starts(tmp_path: Path) -> None:
    script = """
        import subprocess
        sleeper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
        Path(sys.argv[1], "pid").write_text(str(sleeper.pid))
    """
    with owner(tmp_path, script.strip()) as process:
        process.kill()
        process.wait()
        child = int((tmp_path / "pid").read_text())
        try:
            assert reap(tmp_path, PREFIX) == [f"{PREFIX}other"]
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_outlives_the_owner_does_not_keep_its_folder(tmp_path: Path) -> None:
    script = """
        child = os.fork()
        if child == 0:
            held.release()  # not the child's to delete
            print(os.getpid(), held.folder.exists(), file=open(sys.argv[1] + "/pid", "w"), flush=True)
            os.close(1)
            import time
            time.sleep(60)
        while not os.path.exists(sys.argv[1] + "/pid") or not open(sys.argv[1] + "/pid").read():
            pass
    """
    with owner(tmp_path, script.strip()) as process:
        child, still_there = (tmp_path / "pid").read_text().split()
        try:
            assert still_there == "True"
            assert reap(tmp_path, PREFIX) == []
            process.kill()
            process.wait()
            assert reap(tmp_path, PREFIX) == [f"{PREFIX}other"]
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_folder_without_a_lock_file_stays_for_the_grace_period_and_longer_if_it_holds_anything(
    tmp_path: Path,
) -> None:
    unfinished, data = tmp_path / f"{PREFIX}unfinished", tmp_path / f"{PREFIX}data"
    for folder in (unfinished, data):
        folder.mkdir()
    (unfinished / f"{LOCK}.pending").touch()
    (data / "precious").touch()
    assert reap(tmp_path, PREFIX) == []
    age(unfinished)
    age(data)
    assert reap(tmp_path, PREFIX) == [unfinished.name]
    assert (data / "precious").exists()


def test_other_prefixes_files_and_links_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    assert reap(tmp_path, PREFIX) == []
    assert (target / LOCK).exists()
    assert reap(tmp_path / "absent", PREFIX) == []


def test_two_reapers_at_once_delete_each_folder_once(tmp_path: Path) -> None:
    for i in range(50):
        folder = tmp_path / f"{PREFIX}{i}"
        folder.mkdir()
        (folder / LOCK).touch()
        (folder / "file").touch()
    reaped: list[str] = []
    threads = [threading.Thread(target=lambda: reaped.extend(reap(tmp_path, PREFIX))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []
    assert sorted(reaped) == sorted(f"{PREFIX}{i}" for i in range(50))


def test_a_folder_that_was_claimed_again_under_its_old_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a reaper's open and its lock, another one deletes the folder and a new owner takes the name."""
    folder = tmp_path / f"{PREFIX}name"
    folder.mkdir()
    (folder / LOCK).touch()
    lock, claims = fcntl.flock, []

    def late(descriptor: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert reap(tmp_path, PREFIX) == [folder.name]
        claims.append(claim(folder))
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    assert reap(tmp_path, PREFIX) == []
    assert (folder / LOCK).exists()
    claims[0].release()


def test_what_is_discarded_before_a_folder_goes_is_still_there(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}dead"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "file").touch()
    seen: list[bool] = []
    reap(tmp_path, PREFIX, discard=lambda each: seen.append((each / "file").exists()))
    assert seen == [True]


def test_a_folder_that_cannot_be_removed_for_want_of_descriptors_can_be_reaped_later(tmp_path: Path) -> None:
    made = claim(tmp_path / f"{PREFIX}mine")
    for name in ("one", "two"):
        (made.folder / name).mkdir()
        (made.folder / name / "file").touch()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(first := os.dup(made.descriptor))  # the first that is not in use
    for free in (0, 1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, limits[1]))
        try:
            assert not remove(made.folder)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (made.folder / LOCK).exists()
    made.release()
    assert not made.folder.exists()
