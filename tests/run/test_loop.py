"""When the loop steps, saves and ends; its parts are stand-ins that write down what was asked of them."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tqppo.errors import OutOfSpace, QueueError
from tqppo.run.checkpoint import CheckpointStore
from tqppo.run.loop import Loop, Schedule
from tqppo.run.signals import StopRequest
from tqppo.space import Digest


class Diary:
    """The trainer and everything around it."""

    def __init__(self, folder: Path, *, signal_in_step: int = -1, leftovers: tuple[str, ...] = ()) -> None:
        self.seen: list[str] = []
        self.stop = StopRequest(self.seen.append)
        self.signal_in_step, self.leftovers = signal_in_step, leftovers
        self.folder = folder
        if signal_in_step == 0:
            self.stop.number = signal.SIGTERM

    def step(self, step: int) -> dict[str, float]:
        if step == self.signal_in_step:
            self.stop.number = signal.SIGINT
        self.seen.append(f"step {step}")
        return {}

    def validate(self) -> dict[str, float]:
        self.seen.append("validate")
        return {"val": 1.0}

    def save_parts(self, folder: Path) -> dict[str, Digest]:
        self.seen.append("save")
        return {}

    def loop(self, **schedule: Any) -> Loop:
        plan = {"max_steps": 4, "validate_every": 0, "validate_before": True, "save_every": 0, "save_on_exit": True}
        return Loop(
            step=self.step,
            schedule=Schedule(**{**plan, **schedule}),
            stop=self.stop,
            store=CheckpointStore(self.folder, keep_last=10, keep_every=0),
            log=lambda step, metrics: self.seen.append(f"log {step}"),
            validate=self.validate,
            measure=lambda metrics, seconds: metrics,
            leftovers=lambda: list(self.leftovers),
            save_parts=self.save_parts,
            driver_state=dict,
            export=lambda: self.seen.append("export"),
        )


def test_a_whole_run(tmp_path: Path) -> None:
    diary = Diary(tmp_path)
    assert diary.loop(max_steps=2).run(0) == 0
    assert diary.seen == ["validate", "log 0", "step 1", "log 1", "step 2", "validate", "log 2", "save", "export"]


@pytest.mark.parametrize(("step", "code", "last"), [(2, 130, "step_000002"), (4, 0, "step_000004")])
def test_a_signal_ends_the_run_after_its_step_and_saves(tmp_path: Path, step: int, code: int, last: str) -> None:
    diary = Diary(tmp_path, signal_in_step=step)
    assert diary.loop().run(0) == code
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == [last]
    assert diary.seen.count("save") == 1


def test_a_signal_before_the_first_step_trains_and_saves_nothing(tmp_path: Path) -> None:
    diary = Diary(tmp_path, signal_in_step=0)
    assert diary.loop().run(0) == 143
    assert diary.seen == []


def test_keys_that_a_step_or_a_validation_left_behind_end_the_run(tmp_path: Path) -> None:
    diary = Diary(tmp_path, leftovers=("a_0_0", "b_0_0"))
    with pytest.raises(QueueError, match=r"^step 1 left 2 keys in the queue: a_0_0, b_0_0"):
        diary.loop(validate_before=False).run(0)
    with pytest.raises(QueueError, match=r"the validation after step 0 left 2 keys in the queue"):
        diary.loop().run(0)


def test_a_checkpoint_that_does_not_fit_ends_the_run_or_is_left_out(tmp_path: Path) -> None:
    stops = Diary(tmp_path / "stops")
    loop = replace(stops.loop(save_every=2), checkpoint_bytes=lambda: 2**60)
    with pytest.raises(OutOfSpace, match="checkpoint of step 2 was not written"):
        loop.run(0)
    goes_on = Diary(tmp_path / "goes-on")
    sizes = iter([0, 2**60])
    loop = replace(
        goes_on.loop(save_every=2, saves_or_stops=False), checkpoint_bytes=lambda: next(sizes), warn=goes_on.seen.append
    )
    assert loop.run(0) == 0
    assert [path.name for path in sorted(goes_on.folder.glob("step_*"))] == ["step_000002"]
    assert any("the checkpoint of step 4 was not written, training goes on" in said for said in goes_on.seen)


def test_an_export_that_fails_does_not_cost_the_last_checkpoint(tmp_path: Path) -> None:
    def fails() -> None:
        raise OutOfSpace("the model was not exported")

    with pytest.raises(OutOfSpace):
        replace(Diary(tmp_path).loop(), export=fails).run(0)
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == ["step_000004"]


def test_a_run_whose_steps_are_all_done_is_exported(tmp_path: Path) -> None:
    diary = Diary(tmp_path)
    assert diary.loop().run(4) == 0
    assert diary.seen == ["export"]
