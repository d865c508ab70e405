"""`metrics.jsonl` and `events.jsonl` of a run: one JSON object per line, flushed as it is written. Imports no torch.

The same metrics give the same bytes; only keys under `TIMINGS` differ between two runs of one config and seed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqppo.errors import CheckpointError

Metrics = dict[str, float]
TIMINGS = ("timing_s/", "timing_per_token_ms/", "perf/")


class MetricsLog:
    """Appends one line per step. What `write` returned from survives a kill of this process."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        _append(self._path, line(step, metrics))


class EventLog:
    """Things that happen once: starts, checkpoints, failures, restarts."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, event: str, **fields: Any) -> None:
        stamp = {"time": round(time.time(), 3), "event": event}
        _append(self._path, json.dumps({**stamp, **fields}, default=str).encode() + b"\n")


def line(step: int, metrics: Mapping[str, float]) -> bytes:
    """A line with its keys in order; what is not finite becomes null, which every JSON reader takes."""
    values = {name: _number(metrics[name]) for name in sorted(metrics)}
    return json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"


def read(path: str | Path) -> list[dict[str, Any]]:
    """Every complete line; one that a kill cut short is left out."""
    return [json.loads(each) for each in _complete_lines(Path(path))]


def cut(path: str | Path, last_step: int) -> None:
    """Drop what was written after a checkpoint (and half a line at the end), before the run goes on from it."""
    path = Path(path)
    if not path.exists():
        return
    keep = 0
    for number, each in enumerate(_complete_lines(path), 1):
        try:
            step = json.loads(each)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}:{number} is not a line of metrics: {error}") from None
        if step > last_step:
            break
        keep += len(each)
    with path.open("r+b") as file:
        file.truncate(keep)


def without_timings(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs of one config and seed agree on."""
    return {name: value for name, value in metrics.items() if not name.startswith(TIMINGS)}


def comparable(path: str | Path) -> bytes:
    """The file without timings, as bytes to compare or hash."""
    return b"".join(json.dumps(without_timings(each)).encode() + b"\n" for each in read(path))


def spread(name: str, values: Sequence[float]) -> Metrics:
    """mean, max and min under a name, as verl's dashboards expect them; nothing for no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def _append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(data)


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else None


def _complete_lines(path: Path) -> Iterable[bytes]:
    return (each for each in path.read_bytes().splitlines(keepends=True) if each.endswith(b"\n"))
