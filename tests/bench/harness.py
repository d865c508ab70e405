"""What every benchmark shares: interleaved alternatives, CPU-seconds of the process tree, one table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

OUTPUT = Path(".bench")


@dataclass
class Timing:
    """What one alternative cost, run by run."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(self.wall_s)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)


def cpu_seconds(pid: int | None = None) -> float:
    """User and system time of a process (this one) and all its descendants, those that were waited for included."""
    this = psutil.Process(pid)
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def interleaved(
    alternatives: Mapping[str, Callable[[], Any]], *, repeats: int, warmups: int = 1,
    after: Callable[[str], Any] = lambda name: None, meters: Mapping[str, Callable[[], float]] = {},
) -> dict[str, Timing]:  # fmt: skip
    """Each alternative once per round, so that a noisy neighbour disturbs them alike. `after` each, not counted.

    `meters` count the CPU-seconds of alternatives that run in processes of their own.
    """
    timings = {name: Timing() for name in alternatives}
    for round_number in range(warmups + repeats):
        for name, run in alternatives.items():
            meter = meters.get(name, cpu_seconds)
            cpu, wall = meter(), time.perf_counter()
            run()
            wall, cpu = time.perf_counter() - wall, meter() - cpu
            after(name)
            if round_number >= warmups:
                timings[name].wall_s.append(wall)
                timings[name].cpu_s.append(cpu)
    return timings


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for i, heading in enumerate(header):
        table.add_column(heading, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None).print(table)


def publish(name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], figures: Any) -> None:
    """Print the table and write `.bench/NAME.json`."""
    show(title, header, rows)
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / f"{name}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    Console().print(f"figures: {path}")
