"""Stands between a host process and a server, so that nothing of the server outlives the host. Run as a script.

    python -I -S _supervisor.py GRACE_S SCRATCH LOG COMMAND…

Leads its own session and starts COMMAND in it. Standard input is a pipe that the host holds: when the
host closes it, or dies in any way, everything is ended (SIGTERM, then SIGKILL after GRACE_S), and the folder
SCRATCH and the server's files in shared memory are removed. When the server's main process dies by itself, its
children are ended likewise. The last word on standard output is the server's exit code; the end of standard
output means that all is over.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED = "/dev/shm/"
LOOK_S, NUM_LOOKS = 1.0, 3  # after something new is in shared memory, look this often whose it is
prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """Only for the case that this very process is killed with SIGKILL."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants() -> list[int]:
    """Live processes below this one; being their reaper, it inherits every orphan."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry)] = int(parent)
    found, wave = [], [os.getpid()]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        found += wave
    return found


def shared_files(pids: list[int], since: float) -> set[str]:
    """Files that these processes made in shared memory; servers that are killed leave theirs behind.

    Found by inode, since a semaphore is mapped under a name that it no longer has. Files in folders are left
    alone: those hold weights, which are somebody else's.
    """
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            inodes |= {int(line.split()[4]) for line in maps if SHARED in line}
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(SHARED):
                        inodes.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    made = set()
    for entry in os.scandir(SHARED):
        with contextlib.suppress(OSError):
            found = entry.stat()
            if found.st_ino in inodes and found.st_ctime >= since and entry.is_file():
                made.add(entry.path)
    return made


def end_all(main: "subprocess.Popen[bytes]", grace_s: float) -> None:
    if grace_s:
        main.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            main.wait(grace_s)
    while pids := descendants():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        main.poll()
        time.sleep(0.01)


def main(grace_s: float, scratch: str, log_path: str, command: list[str]) -> int:
    started = time.time()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the host decides; SIG_IGN would be inherited by the server
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    died, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    with open(log_path, "ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)
    made: set[str] = set()
    seen, looks = 0.0, 0
    while server.poll() is None:
        readable, _, _ = select.select([0, died], [], [], LOOK_S)
        changed = os.stat(SHARED).st_mtime
        looks = NUM_LOOKS if changed != seen or readable else looks - 1
        seen = changed
        if looks > 0:
            made |= shared_files(descendants(), started)
        if died in readable:
            os.read(died, 4096)
        if 0 in readable and not os.read(0, 1):
            break
    end_all(server, grace_s)
    shutil.rmtree(scratch, ignore_errors=True)
    for path in made:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return server.wait()


if __name__ == "__main__":
    code = main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.stdout.write(f"{code}\n")
