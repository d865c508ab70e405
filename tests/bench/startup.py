"""Seconds from the command to the first step, by stage; CPU-seconds and memory of every process meanwhile.

With Ray and in one process, a first run and a second. Linux only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from harness import publish

COMMAND = [str(Path(sys.executable).with_name("tqppo")), "train", "--preset", "quickstart", "--max-steps", "5"]
FIRST_STEP = "step 1/5"
LOOK_S = 0.05
WAYS = {"with Ray": (), "in one process": ("--in-process",)}
RUNS = ("first", "second")
MIB = 2**20
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Start:
    """What one run cost until its first step was done: lines with their seconds, CPU-seconds and bytes by process."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    cpu_s: dict[int, float] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return next(at for at, line in self.lines if line.startswith(FIRST_STEP))

    def processes(self) -> list[tuple[str, float, float]]:
        """Name, CPU-seconds and MiB of each process, the costliest first."""
        found = [(self.names[pid], cpu, self.memory.get(pid, 0) / MIB) for pid, cpu in self.cpu_s.items()]
        return sorted(found, key=lambda each: -each[1])


def started(more: tuple[str, ...], folder: str) -> Start:
    """Run the command until its first step is done, and look at its processes all the while."""
    found, begin = Start(), time.monotonic()
    command = subprocess.Popen(
        [*COMMAND, *more, "--set", f"run.dir={folder}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    done = threading.Event()
    looker = threading.Thread(target=_look, args=(command.pid, found, done))
    looker.start()
    assert command.stdout is not None
    for line in command.stdout:
        found.lines.append((time.monotonic() - begin, ANSI.sub("", line).strip()))
        if found.lines[-1][1].startswith(FIRST_STEP):
            done.set()
            looker.join()
    if command.wait() != 0:
        raise SystemExit("\n".join(line for _, line in found.lines))
    return found


def _look(pid: int, found: Start, done: threading.Event) -> None:
    """Note the CPU-seconds of the command's processes until `done`, then the memory of those that live."""
    command = psutil.Process(pid)
    while True:
        is_last = done.wait(LOOK_S)
        for each in [command, *command.children(recursive=True)]:
            try:
                times = each.cpu_times()
                found.names[each.pid] = _name(each.cmdline())
                found.cpu_s[each.pid] = times.user + times.system
                if is_last:
                    found.memory[each.pid] = each.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        if is_last:
            return


def _name(command: list[str]) -> str:
    """A short name: Ray's title of a worker, else the script or program."""
    if command and command[0].startswith("ray::"):
        return command[0]
    scripts = [each for each in command[:6] if each.endswith((".py", "tqppo"))] or command[:1] or ["?"]
    return os.path.join(*Path(scripts[0]).parts[-2:])


def main() -> None:
    figures: dict[str, object] = {}
    rows = []
    for way, more in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            for run in RUNS:
                start = started(more, folder)
                cpu, memory = sum(start.cpu_s.values()), sum(start.memory.values()) / MIB
                rows.append([f"{way}, {run} run", start.seconds, cpu, round(memory), len(start.memory)])
                figures[f"{way}, {run}"] = {
                    "seconds": start.seconds, "cpu_s": cpu, "pss_mib": memory,
                    "stages": start.lines, "processes": start.processes(),
                }  # fmt: skip
                for at, line in start.lines:
                    print(f"{at:7.2f} s  {line}")
                    if line.startswith(FIRST_STEP):
                        break
                for name, seconds, mib in start.processes():
                    print(f"  {seconds:6.2f} CPU-s {mib:6.0f} MiB  {name}")
    header = ["start", "s to the first step", "CPU-s", "MiB (PSS)", "processes"]
    publish("startup", "From the command to the first step of the quickstart", header, rows, figures)


if __name__ == "__main__":
    main()
