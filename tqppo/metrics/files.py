"""`metrics.jsonl` and `events.jsonl` of a run: one JSON object per line, written without a buffer. Imports no torch.

Two runs of one config and seed write the same bytes, except for the keys that `is_timing` names.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

from tqppo import space
from tqppo.errors import OutOfSpace
from tqppo.metrics.events import Event
from tqppo.protocols import Metrics

Line = dict[str, float | None]  # one line of metrics.jsonl; null stands for a value that was not finite
TIME = "time"  # when a line was written, in seconds since 1970
TIMINGS = ("timing_s/", "timing_per_token_ms/", "perf/", "teacher/")  # teachers answer from their cache, too


class WaitingLines:
    """Appends lines to a file. Lines that do not fit on the disk are an `OutOfSpace`, and go before the next one."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._waiting = Path(path), b""

    def add(self, line: bytes) -> None:
        self._waiting += line
        self.flush()

    def flush(self) -> None:
        """Write the lines that had no room before."""
        waiting, self._waiting = self._waiting, b""  # a signal may end the run in the write, and must not repeat it
        if not waiting:
            return
        try:
            space.append_line(self.path, waiting)
        except OutOfSpace:
            self._waiting = waiting
            raise


class MetricsLog:
    """Appends one line per step. Once `write` returns, the line survives SIGKILL.

    A line that does not fit on the disk is an `OutOfSpace`, and is kept: it goes before the next one, or with `flush`.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = WaitingLines(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.add(line(step, {**metrics, TIME: round(time.time(), 3)}))

    def flush(self) -> None:
        """Write the lines that had no room before."""
        self._lines.flush()

    def sync(self) -> None:
        """Write what is left, and return once all lines are on the disk."""
        self.flush()
        if self._lines.path.exists():
            space.sync(self._lines.path)


class EventLog:
    """Appends one line per event: start, what the driver reports, warnings, end. Events that find the disk full wait
    for room."""

    def __init__(self, path: str | Path) -> None:
        self._lines = WaitingLines(path)

    def write(self, event: str, **fields: object) -> None:
        stamp = {"time": round(time.time(), 3), "event": event}
        with suppress(OutOfSpace):  # the screen shows the same; a run does not end for its journal
            self._lines.add(json.dumps({**stamp, **fields}, default=str).encode() + b"\n")

    def report(self, event: Event) -> None:
        """Append a typed event, with its fields under their names."""
        self.write(event.name, **asdict(event))


def line(step: int, metrics: Mapping[str, float]) -> bytes:
    """One line with sorted keys. Values that are not finite become null, because JSON has no NaN."""
    values = {name: _number(metrics[name]) for name in sorted(metrics)}
    return json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"


def read(path: str | Path) -> list[Line]:
    """Read every complete line; a last line that a kill cut short, and lines that are damaged, are left out."""
    return [json.loads(each) for each in _complete_lines(Path(path)) if _step_of(each) is not None]


def last_event(path: str | Path, name: str) -> Mapping[str, object]:
    """The last event of that name; empty if there is none. Lines that are damaged are left out."""
    path, marker = Path(path), f'"event": "{name}"'.encode()
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for each in reversed(lines):
        if marker in each:
            with suppress(ValueError, RecursionError):
                found = json.loads(each)
                if isinstance(found, dict) and found.get("event") == name:
                    return found
    return {}


def cut(path: str | Path, last_step: int) -> list[str]:
    """Remove the lines after step `last_step`, and an incomplete last line, before a run resumes from there.

    Lines that are damaged are repaired or left out; the file as it was is then kept beside it. Returns what to tell the
    user: which lines were damaged, and which steps have no line.
    """
    path, said = Path(path), []
    before = path.read_bytes() if path.exists() else b""
    lines = [(_step_of(each), each) for each in before.splitlines(keepends=True) if each.endswith(b"\n")]
    damaged = [number for number, (step, _) in enumerate(lines, 1) if step is None and number < len(lines)]
    whole = [_whole_part(each) if step is None else (step, each) for step, each in lines]
    after = [(step, each) for step, each in whole if step is not None and step <= last_step]
    if damaged:
        copy = _unused(path.with_name(f"{path.name}.damaged"))
        space.write_whole(copy, before)
        said.append(f"{path}: line {damaged[0]} is damaged; the file as it was is {copy}")
    if (joined := b"".join(each for _, each in after)) != before:
        space.write_whole(path, joined)
    missing = sorted({*range(1, last_step + 1)} - {step for step, _ in after})
    if missing:
        said.append(f"{path} has no line for {len(missing)} of {last_step} steps, the first of them step {missing[0]}")
    return said


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _whole_part(line: bytes) -> tuple[int | None, bytes]:
    """The last whole line within a damaged one: a write that was cut short may have joined two."""
    last = line[max(0, line.rfind(b'{"step": ')) :]
    return _step_of(last), last


def _unused(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return path if not path.exists() else next(each for each in numbered if not each.exists())


def without_timings(metrics: Mapping[str, float | None]) -> Line:
    """The metrics that two runs of one config and seed agree on."""
    return {name: value for name, value in metrics.items() if not is_timing(name)}


def is_timing(name: str) -> bool:
    is_of_a_tool = name.startswith("tool/") and name.endswith("/seconds")
    return name == TIME or is_of_a_tool or name.startswith(TIMINGS)


def comparable(path: str | Path) -> bytes:
    """The file's content without timings, as bytes to compare or hash."""
    return b"".join(json.dumps(without_timings(each)).encode() + b"\n" for each in read(path))


def spread(name: str, values: Sequence[float]) -> Metrics:
    """mean, max and min under the names that verl's dashboards use; empty without values."""
    if not values:
        return {}
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def _number(value: float) -> float | int | None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else None


def _complete_lines(path: Path) -> Iterable[bytes]:
    return (each for each in path.read_bytes().splitlines(keepends=True) if each.endswith(b"\n"))
