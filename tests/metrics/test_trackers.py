"""Trackers: TensorBoard for real, W&B against a small module that behaves like it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tqppo.errors import PreflightError
from tqppo.metrics import trackers


def _scalars(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("actor/kl")}


def test_tensorboard_files_hold_what_was_logged(tmp_path: Path) -> None:
    board = trackers.load(["tensorboard"], tmp_path)
    for step in range(1, 4):
        board.log(step, {"actor/kl": step / 2, "actor/loss": float("nan")})
    board.close()
    assert _scalars(tmp_path) == {1: 0.5, 2: 1.0, 3: 1.5}


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = trackers.load(["tensorboard"], tmp_path)
    for step in range(1, 6):
        first.log(step, {"actor/kl": 1.0})
    first.close()
    again = trackers.load(["tensorboard"], tmp_path, first_step=4)
    again.log(4, {"actor/kl": 2.0})
    again.close()
    assert _scalars(tmp_path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}


class _FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings, self.lines, self.is_finished = settings, [], False

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((step, metrics))

    def finish(self) -> None:
        self.is_finished = True


def test_wandb_goes_on_in_the_same_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[_FakeRun] = []
    fake = ModuleType("wandb")
    fake.init = lambda **settings: runs.append(_FakeRun(**settings)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (1, 2):
        tracker = trackers.load(["wandb"], tmp_path, project="p", config={"mode": "grpo"})
        tracker.log(step, {"actor/kl": 0.5})
        tracker.close()
    assert [run.lines for run in runs] == [[(1, {"actor/kl": 0.5})], [(2, {"actor/kl": 0.5})]]
    assert runs[0].settings["id"] == runs[1].settings["id"]
    assert runs[0].settings["resume"] == "allow"
    assert all(run.is_finished for run in runs)


def test_a_missing_tracker_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PreflightError, match=r"pip install 'tqppo\[wandb\]'"):
        trackers.check(["wandb"])
    with pytest.raises(PreflightError, match=r"pip install 'tqppo\[wandb\]'") as caught:
        trackers.load(["wandb"], tmp_path)
    assert caught.value.exit_code == 4


def test_no_trackers_is_fine(tmp_path: Path) -> None:
    none = trackers.load([], tmp_path)
    none.log(1, {"actor/kl": 1.0})
    none.close()
    assert list(tmp_path.iterdir()) == []
