"""`metrics.jsonl` and `events.jsonl` of a run: one JSON object per line, written without a buffer. Imports no torch.

Two runs of one config and seed write the same bytes, except for the keys that begin with one of `TIMINGS`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tqppo import space
from tqppo.protocols import Metrics

Line = dict[str, float | None]  # one line of metrics.jsonl; null stands for a value that was not finite
TIMINGS = ("timing_s/", "timing_per_token_ms/", "perf/", "teacher/")  # teachers answer from their cache, too


class MetricsLog:
    """Appends one line per step. Once `write` returns, the line survives SIGKILL."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        space.append(self._path, line(step, metrics))


class EventLog:
    """Appends one line per event: start, checkpoint, failure, end."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, event: str, **fields: object) -> None:
        stamp = {"time": round(time.time(), 3), "event": event}
        space.append(self._path, json.dumps({**stamp, **fields}, default=str).encode() + b"\n")


def line(step: int, metrics: Mapping[str, float]) -> bytes:
    """One line with sorted keys. Values that are not finite become null, because JSON has no NaN."""
    values = {name: _number(metrics[name]) for name in sorted(metrics)}
    return json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"


def read(path: str | Path) -> list[Line]:
    """Read every complete line; a last line that a kill cut short is left out."""
    return [json.loads(each) for each in _complete_lines(Path(path))]


def cut(path: str | Path, last_step: int) -> str:
    """Remove the lines after step `last_step`, and an incomplete last line, before a run resumes from there.

    Lines that are damaged are left out. The file as it was is then kept beside it, and the returned text says so.
    """
    path = Path(path)
    if not path.exists():
        return ""
    before = path.read_bytes()
    steps = [(_step_of(each), each) for each in _complete_lines(path)]
    damaged = [number for number, (step, _) in enumerate(steps, 1) if step is None and number < len(steps)]
    after = b"".join(each for step, each in steps if step is not None and step <= last_step)
    if damaged:
        copy = path.with_name(f"{path.name}.damaged")
        space.write_whole(copy, before)
    if after != before:
        space.write_whole(path, after)
    return f"{path}: line {damaged[0]} is damaged and was left out; the file as it was is {copy}" if damaged else ""


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def without_timings(metrics: Mapping[str, float | None]) -> Line:
    """The metrics that two runs of one config and seed agree on."""
    return {name: value for name, value in metrics.items() if not name.startswith(TIMINGS)}


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
