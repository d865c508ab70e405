"""What the processes of a run hold: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from tqppo.processes.reaper import LOCK

SHM = Path("/dev/shm")
Sample = dict[tuple[str, str], float]  # by process and figure


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def sampled(pid: int) -> Sample:
    """The figures of a run's processes. One that ends meanwhile is left out."""
    relatives = family(pid)
    found: Sample = {("all", "shm_mb"): _shared_mb({each.pid for each in relatives})}
    for process in relatives:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
            name = f"{title(process)} {process.pid}"
            found[name, "rss_mb"] = process.memory_info().rss / 2**20
            found[name, "descriptors"] = process.num_fds()
            found[name, "threads"] = process.num_threads()
    return found


def title(process: psutil.Process) -> str:
    """A short name: the actor's class of a Ray worker, the module of a Python process, else the program's name."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    modules = [after for word, after in pairwise(words) if word == "-m"]
    return modules[0] if modules else Path(words[0]).name


def _shared_mb(pids: set[int]) -> float:
    """Shared memory in the folders that one of these processes owns."""
    total = 0
    for lock in SHM.glob(f"tqppo-*/{LOCK}"):
        with contextlib.suppress(OSError, ValueError):
            if int(lock.read_text()) in pids:
                total += sum(file.stat().st_blocks * 512 for file in lock.parent.rglob("*") if file.is_file())
    return total / 2**20


@contextlib.contextmanager
def held_up(pid: int, rng: random.Random) -> Iterator[str]:
    """Stop one process of a run for a moment, and let it go on. Yields its name."""
    chosen = rng.choice(family(pid)[1:])
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        name = title(chosen)
        os.kill(chosen.pid, signal.SIGSTOP)
        try:
            time.sleep(rng.uniform(0.05, 1.0))
            yield name
        finally:
            os.kill(chosen.pid, signal.SIGCONT)
        return
    yield "none"
