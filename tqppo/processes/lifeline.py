"""Ends processes and removes files that must not outlive their owner, however the owner dies.

Used by `run.cluster` (Ray's processes), by the reward pool, and by the engines that run as servers. This file is also
the script of the guard, a small process between an owner and what it started:

    python -I -S lifeline.py [--remove PATTERN]… [--reap PATTERN]… [--grace-s S] [--log FILE] [COMMAND…]

The owner holds the guard's standard input. When that pipe closes, which the kernel does even after SIGKILL, the guard
ends COMMAND, everything COMMAND started and every process named on the pipe, then removes what matches the
patterns; of those to reap, only folders whose lock is free (`tqppo.processes.reaper` explains the lock).
When COMMAND ends by itself, the guard cleans up likewise. It writes the exit code of COMMAND to standard output, whose
end means that no process is left. Standard library only, so that any interpreter can run it. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED = "/dev/shm/"  # `space.SHARED_MEMORY`; written again because this script imports nothing of tqppo
LOOK_S, NUM_LOOKS = 1.0, 3  # after a change in shared memory, look this often for files of the command
KILL_TIMEOUT_S = 10.0  # a process in an uninterruptible system call ignores SIGKILL until the call returns
LOCK = ".lock"  # `reaper.LOCK`; written again for the same reason


class Stat(NamedTuple):
    parent: int
    started: int  # clock ticks since boot; tells a process from a later one with the same pid


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. `parent` is the pid expected there."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopts: bool = True) -> None:
    """Make processes below this one, whose parents end, children of this process, so that `end` reaches them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts))


def supervise(parent: int) -> None:
    """Return in a child of this process, which stays as the child's supervisor and never returns.

    When the child ends, when the thread of `parent` that started this process ends, or on SIGTERM, the supervisor ends
    everything that the child started, in whatever session, and then ends as the child did.
    """
    own = os.getpid()
    adopt_orphans()
    before = signal.signal(signal.SIGTERM, _raise_system_exit)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a function that signals its own process group must not reach the supervisor
        signal.signal(signal.SIGTERM, before)
        die_with_parent(own)
        return
    code = -signal.SIGTERM
    with contextlib.suppress(SystemExit):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            code = _exit_code_of(child)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_children()
    if code < 0:  # signals have no exit code; the supervisor ends by the same one
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(own, -code)
    os._exit(code if code >= 0 else 1)


def _raise_system_exit(*_: object) -> None:
    raise SystemExit


def _exit_code_of(child: int) -> int:
    """Wait for a child, and reap others that end before it."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def descendants(pid: int) -> list[int]:
    """Live processes below `pid`, without `pid` itself."""
    return _below({pid}, _live())


def end(pids: Iterable[int], grace_s: float = 0.0) -> None:
    """End processes and everything below them; returns when none is left.

    With `grace_s`, `pids` get SIGTERM and that much time to end by themselves. The rest gets SIGKILL.
    """
    roots, live = set(pids), _live()
    targets = {pid: live[pid].started for pid in [*roots, *_below(roots, live)] if pid in live}
    if grace_s:
        for pid in roots & targets.keys():
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(_is_same(pid, targets[pid]) for pid in roots & targets.keys()):
            time.sleep(0.02)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        live = _live()
        left = {pid for pid, started in targets.items() if pid in live and live[pid].started == started}
        if not left:
            return
        targets |= {pid: live[pid].started for pid in _below(left, live)}
        for pid in left | set(_below(left, live)):
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)


def end_children() -> None:
    """Kill and reap every process below this one, in whatever session it is."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:
            continue
        for each in descendants(os.getpid()):
            _signal(each, signal.SIGKILL)
        time.sleep(0.002)


def guard_command(
    command: Sequence[str] = (),
    *,
    remove: Sequence[str] = (),
    reap: Sequence[str] = (),
    grace_s: float = 0.0,
    log: str = "",
) -> list[str]:
    """The command line of a guard; see the top of this file."""
    removals = [*(f"--remove={pattern}" for pattern in remove), *(f"--reap={pattern}" for pattern in reap)]
    options = [*removals, f"--grace-s={grace_s}", f"--log={log or os.devnull}"]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *options, "--", *command]


class Watcher:
    """A guard without a command, seen from its owner: `watch` names the processes that must not outlive it."""

    def __init__(self, remove: Sequence[str], reap: Sequence[str] = ()) -> None:
        command = guard_command(remove=remove, reap=reap)
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def watch(self, pids: Iterable[int]) -> None:
        live = _live()
        self._tell(*(f"{pid} {live[pid].started}" for pid in pids if pid in live and pid != self._guard.pid))

    def close(self) -> None:
        """End the guard. It does what the owner should have done and could not, for want of descriptors, say."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it stands still; what it has to do is most likely nothing
            self._guard.kill()

    @property
    def pid(self) -> int:
        return self._guard.pid

    def _tell(self, *lines: str) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write("".join(f"{line}\n" for line in lines))
        self._guard.stdin.flush()


class SharedFiles:
    """The files in /dev/shm that processes below this one made; a server that is killed leaves its files behind.

    They are found by inode, because a semaphore is mapped under a name that it no longer has. Files in folders are
    left alone: those hold weights and belong to the publisher.
    """

    def __init__(self) -> None:
        self._since, self._changed, self._looks = time.time(), 0.0, 0
        self._paths: set[str] = set()

    def look(self, *, now: bool) -> None:
        """Record new files: `now`, or after a change of the folder, since reading every process's mappings is slow."""
        changed = os.stat(SHARED).st_mtime
        self._looks = NUM_LOOKS if now or changed != self._changed else self._looks - 1
        self._changed = changed
        if self._looks > 0:
            self._paths |= self._found()

    def remove(self) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _found(self) -> set[str]:
        inodes = {inode for pid in descendants(os.getpid()) for inode in _shared_inodes(pid)}
        paths = set()
        for entry in os.scandir(SHARED):
            with contextlib.suppress(OSError):
                stat = entry.stat()
                if stat.st_ino in inodes and stat.st_ctime >= self._since and entry.is_file():
                    paths.add(entry.path)
        return paths


def _shared_inodes(pid: int) -> set[int]:
    """Inodes of files in shared memory that a process maps or holds open."""
    inodes: set[int] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        inodes |= {int(line.split()[4]) for line in maps if SHARED in line}
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(descriptor.path).startswith(SHARED):
                    inodes.add(os.stat(descriptor.path).st_ino)
    return inodes


def _live() -> dict[int, Stat]:
    """Every process of this machine that is not a zombie."""
    stats = ((int(name), _stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid, stat in stats if stat is not None}


def _stat(pid: int) -> Stat | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else Stat(int(fields[1]), int(fields[19]))


def _is_same(pid: int, started: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat.started == started


def _below(roots: set[int], live: dict[int, Stat]) -> list[int]:
    found, generation = [], list(roots)
    while generation:
        parents = set(generation)
        generation = [pid for pid, stat in live.items() if stat.parent in parents and pid not in roots]
        found += generation
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reap(folder: str) -> None:
    """Delete a folder of this user whose owner is dead. One without a lock file may be about to get it: it stays."""
    with contextlib.suppress(OSError), open(os.path.join(folder, LOCK), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock.fileno()).st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _start(command: Sequence[str], log_path: str) -> subprocess.Popen[bytes]:
    guard = os.getpid()
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: die_with_parent(guard),  # for the case that the guard itself is killed
        )


def _catch_signals() -> int:
    """Leave the decision to the owner. Returns a descriptor that becomes readable when a child ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the command
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    return read_end


def _wait(command: subprocess.Popen[bytes] | None, signals: int, shared: SharedFiles) -> list[str]:
    """Block until the owner closes the pipe or the command ends; returns the whole lines that the owner wrote."""
    text = b""
    while command is None or command.poll() is None:
        readable, _, _ = select.select([0, signals], [], [], None if command is None else LOOK_S)
        if command is not None:
            shared.look(now=bool(readable))
        if signals in readable:
            os.read(signals, 4096)
        if 0 in readable:
            read = os.read(0, 65_536)
            text += read
            if not read:
                break
    return text.decode().split("\n")[:-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--remove", action="append", default=[])
    parser.add_argument("--reap", action="append", default=[])
    parser.add_argument("--grace-s", type=float, default=0.0)
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    adopt_orphans()
    signals, shared = _catch_signals(), SharedFiles()
    command = _start(options.command, options.log) if options.command else None
    lines = _wait(command, signals, shared)
    named = [tuple(map(int, line.split())) for line in lines]
    end([] if command is None else [command.pid], options.grace_s)
    end([*descendants(os.getpid()), *(pid for pid, started in named if _is_same(pid, started))])
    for pattern in options.remove:
        for path in glob.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for pattern in options.reap:
        for path in glob.glob(pattern):
            _reap(path)
    shared.remove()
    if command is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(KILL_TIMEOUT_S)
        sys.stdout.write(f"{-signal.SIGKILL if command.returncode is None else command.returncode}\n")


if __name__ == "__main__":
    main()
