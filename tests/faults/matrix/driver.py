"""`tqppo` that stands still where a fault is to come: `python -m faults.matrix.driver STAGE FOLDER ARGUMENTS…`.

When the stage first begins after a checkpoint was saved it writes `at.json`, which has the pids of the ranks, into
FOLDER, and waits for a file `go` there. The fault is injected meanwhile, so that the stage itself meets it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tqppo.cli import app
from tqppo.processes.ray_launcher import RayProcess
from tqppo.run.checkpoint import CheckpointStore, Draft
from tqppo.trainers.side_by_side import Clock
from tqppo.workers.process.group import WorkerGroup

CLOCKED = {
    "generation": "gen",
    "scoring": "old_log_prob",
    "update": "update_actor",
    "publish": "update_weights",
    "validation": "testing",
}
MOST_S = 120.0  # without a `go`


def main() -> None:
    stage, folder = sys.argv[1], Path(sys.argv[2])
    groups: list[Any] = []
    _note_groups(groups)
    hold = _held(folder, groups)
    _at_save(hold) if stage == "save" else _at_stage(CLOCKED[stage], hold)
    sys.argv = ["tqppo", *sys.argv[3:]]
    app()


def _held(folder: Path, groups: list[Any]) -> Callable[[], None]:
    """A function that holds this process up when it is first called after a checkpoint was saved."""

    def hold() -> None:
        if (folder / "at.json").exists() or not list(folder.glob("runs/cell/checkpoints/step_*")):
            return
        ranks = {f"{group.role} {i}": rank for group in groups for i, rank in enumerate(group._processes)}
        pids = {name: _pid(rank) for name, rank in ranks.items() if isinstance(rank, RayProcess)}
        draft = folder / "at.draft"
        draft.write_text(json.dumps(pids))
        draft.rename(folder / "at.json")
        deadline = time.monotonic() + MOST_S
        while not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    return hold


def _pid(rank: RayProcess[Any]) -> int:
    return int(ray.get(rank.actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60))


def _note_groups(groups: list[Any]) -> None:
    start = WorkerGroup.start

    def noted(group: Any, *arguments: Any) -> None:
        groups.append(group)
        start(group, *arguments)

    WorkerGroup.start = noted  # type: ignore[method-assign]


def _at_stage(name: str, hold: Callable[[], None]) -> None:
    timed = Clock.time

    @contextmanager
    def held(clock: Clock, stage: str) -> Iterator[None]:
        with timed(clock, stage):
            if stage == name:
                hold()
            yield

    Clock.time = held  # type: ignore[method-assign, assignment]


def _at_save(hold: Callable[[], None]) -> None:
    begin = CheckpointStore.begin

    def held(store: CheckpointStore, *arguments: Any, **named: Any) -> Draft:
        draft = begin(store, *arguments, **named)
        hold()
        return draft

    CheckpointStore.begin = held  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
