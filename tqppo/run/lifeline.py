"""Cleans up after a run that was killed: a small process that outlives it for a moment. `cluster` starts it.

Ray ends most of its processes with the driver, but its agents linger for a minute, and folders stay for good.
It reads one process per line, `pid start-time`, from its standard input; when that closes without a `done`, the
driver is dead: it kills those processes with all they started, and removes the folders named on its command line.
"""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

import psutil


class Undertaker:
    """The driver's end. `folders` are patterns of what must not outlive the run."""

    def __init__(self, folders: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tqppo.run.lifeline", *folders]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        others = [process for process in processes if process.pid != self._process.pid]
        self._say(*(f"{process.pid} {process.create_time()!r}" for process in others))

    def dismiss(self) -> None:
        """The run has cleaned up by itself."""
        self._say("done")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, *lines: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{line}\n" for line in lines))
        self._process.stdin.flush()


def main(folders: Sequence[str]) -> None:
    watched: list[psutil.Process] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        pid, started = line.split()
        watched += _same(int(pid), float(started))
    for process in [*watched, *(child for each in watched for child in _children(each))]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for pattern in folders:
        for folder in glob.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def _same(pid: int, started: float) -> list[psutil.Process]:
    """The process with this number, if it is still the one that was meant."""
    try:
        process = psutil.Process(pid)
        return [process] if process.create_time() == started else []
    except psutil.NoSuchProcess:
        return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main(sys.argv[1:])
