"""Starts of a run that end badly: what they leave to the next one. Whole runs, rehearsed without Ray."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run.rehearsal import Rehearsal, contents, left_behind

from tqppo.config.plan.budget import make_budget
from tqppo.config.plan.machine import Machine
from tqppo.config.plan.memory import total
from tqppo.errors import CheckpointError, EngineError, LockLost, OutOfSpace, PreflightError, TqppoError
from tqppo.run import start
from tqppo.run.checkpoint import CheckpointStore
from tqppo.run.lock import RunLock


def send(*numbers: signal.Signals) -> Callable[[], None]:
    """Signals to this process, handled one after the other."""

    def action() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return action


def fails_with(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_goes_on_from_an_earlier_step_leaves_no_metrics_or_checkpoints_to_jump_to(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.train("mine", "checkpoint.keep_last=9")
    rehearsal.troubles["step 3"] = send(signal.SIGTERM, signal.SIGTERM)
    assert rehearsal.resume("mine/checkpoints/step_000002") == 143
    assert rehearsal.steps("mine") == [0, 1, 2]
    store = CheckpointStore(rehearsal.folder("mine").checkpoints)
    assert store.steps() == [1, 2]
    said = [event["message"] for event in rehearsal.events("mine") if event["event"] == "warning"]
    assert said == ["going on from step 2; later checkpoints (3, 4) go as the run passes them"]
    assert rehearsal.resume("mine") == 0
    assert store.steps() == [1, 2, 3, 4]
    assert left_behind(rehearsal.folder("mine").path) == []


@pytest.mark.parametrize("moment", ["build", "load"])
def test_a_start_that_fails_leaves_the_run_as_it_was(rehearsal: Rehearsal, moment: str) -> None:
    """Also the metrics of steps after the checkpoint, and later checkpoints."""
    rehearsal.troubles["step 4"] = send(signal.SIGINT, signal.SIGINT)
    assert rehearsal.train("mine", "checkpoint.keep_last=9", "checkpoint.interval=2") == 130
    before = contents(rehearsal.folder("mine").path, "logs/", "events.jsonl")
    assert rehearsal.steps("mine") == [0, 1, 2, 3]
    for error in (PreflightError("Ray did not start"), CheckpointError("the teacher is another one")):
        rehearsal.troubles[moment] = fails_with(error)
        with pytest.raises(TqppoError, match=str(error)):
            rehearsal.resume("mine/checkpoints/step_000002")
        assert contents(rehearsal.folder("mine").path, "logs/", "events.jsonl") == before


# -- signals -----------------------------------------------------------------------------------------------------------


def test_the_first_signal_saves_and_a_resume_ends_in_the_same_bytes(rehearsal: Rehearsal) -> None:
    rehearsal.train("whole")
    rehearsal.troubles["step 2"] = send(signal.SIGINT)
    assert rehearsal.train("mine", "checkpoint.interval=0") == 130
    assert rehearsal.saved("mine") == ["step_000002"]
    assert rehearsal.resume("mine") == 0
    assert rehearsal.result("mine") == rehearsal.result("whole")


@pytest.mark.parametrize("moment", ["save step_000003", "export"])
def test_a_second_signal_inside_a_save_or_an_export_costs_only_that(rehearsal: Rehearsal, moment: str) -> None:
    rehearsal.train("whole")
    rehearsal.troubles[moment] = send(signal.SIGINT, signal.SIGTERM)
    assert rehearsal.train("mine") == 130
    run = rehearsal.folder("mine")
    last = 2 if "save" in moment else 4
    assert rehearsal.saved("mine") == [f"step_{step:06d}" for step in (last - 1, last)]
    assert left_behind(run.path) == []
    assert rehearsal.events("mine")[-1]["exit_code"] == 130
    assert (run.path / ".lock").read_text() == ""
    assert rehearsal.resume("mine") == 0
    assert rehearsal.result("mine") == rehearsal.result("whole")


def test_the_note_after_a_signal_does_not_promise_a_checkpoint_that_is_switched_off(
    rehearsal: Rehearsal, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal.troubles["step 2"] = send(signal.SIGINT)
    assert rehearsal.train("mine", "checkpoint.interval=0", "checkpoint.save_on_exit=false") == 130
    said = capsys.readouterr().out
    assert "without saving (checkpoint.save_on_exit)" in said
    assert "tqppo resume" not in said


# -- the export --------------------------------------------------------------------------------------------------------


def export_is_gone(rehearsal: Rehearsal) -> None:
    shutil.rmtree(rehearsal.folder("mine").export)


def export_is_of_another_step(rehearsal: Rehearsal) -> None:
    run = rehearsal.folder("mine")
    (run.export / "model").write_text("weights of another step")
    (run.export.parent / ".step").write_text("3")


def export_is_not_known(rehearsal: Rehearsal) -> None:
    (rehearsal.folder("mine").export.parent / ".step").write_text("")


def killed_as_it_replaced_the_export(rehearsal: Rehearsal) -> None:
    run = rehearsal.folder("mine")
    (run.export.parent / ".step").unlink()
    run.export.rename(run.export.with_name(".before-hf"))


@pytest.mark.parametrize(
    "damage", [export_is_gone, export_is_of_another_step, export_is_not_known, killed_as_it_replaced_the_export]
)
def test_a_resume_of_a_complete_run_makes_an_export_that_is_missing_and_trains_nothing(
    rehearsal: Rehearsal, damage: Callable[[Rehearsal], None]
) -> None:
    rehearsal.train("mine")
    before = rehearsal.result("mine")
    damage(rehearsal)
    rehearsal.seen.clear()
    assert rehearsal.resume("mine") == 0
    assert rehearsal.seen == ["build", "load", "export"]
    assert rehearsal.result("mine") == before
    assert left_behind(rehearsal.folder("mine").path) == []
    rehearsal.seen.clear()
    assert rehearsal.resume("mine") == 0
    assert rehearsal.seen == []


def test_an_export_without_room_is_named_and_made_by_a_resume(rehearsal: Rehearsal) -> None:
    rehearsal.troubles["export"] = fails_with(OutOfSpace("no room for 7 bytes"))
    with pytest.raises(OutOfSpace, match=r"not exported: no room for 7 bytes; `tqppo resume mine`"):
        rehearsal.train("mine")
    assert left_behind(rehearsal.folder("mine").path) == []
    rehearsal.seen.clear()
    assert rehearsal.resume("mine") == 0
    assert rehearsal.seen == ["build", "load", "export"]


# -- two processes -----------------------------------------------------------------------------------------------------


def test_a_run_that_was_taken_over_ends_before_it_writes(rehearsal: Rehearsal) -> None:
    """As after a stop that outlasted the lease, while a process of another machine went on with the run."""
    path = rehearsal.runs / "mine" / ".lock"

    def take_over() -> None:
        holder = {**json.loads(path.read_text()), "pid": 7, "token": "another"}
        path.write_text(json.dumps(holder))
        (rehearsal.folder("mine").checkpoints / ".partial-step_000009-ab").mkdir()  # its save is on the way

    rehearsal.troubles["step 3"] = take_over
    with pytest.raises(LockLost, match="was taken over by process 7"):
        rehearsal.train("mine")
    assert rehearsal.steps("mine") == [0, 1, 2]
    assert rehearsal.saved("mine") == [".partial-step_000009-ab", "step_000001", "step_000002"]
    assert json.loads(path.read_text())["token"] == "another"
    assert rehearsal.events("mine")[-1]["event"] != "end"


@pytest.mark.parametrize("moment", ["save step_000003", "export"])
def test_a_run_that_is_taken_over_during_a_save_or_an_export_leaves_the_other_s_files_alone(
    rehearsal: Rehearsal, moment: str
) -> None:
    path = rehearsal.runs / "mine" / ".lock"
    other = rehearsal.folder("mine").checkpoints / ".partial-step_000009-ab"

    def take_over() -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), "token": "another"}))
        other.mkdir()
        raise NO_SPACE

    rehearsal.troubles[moment] = take_over
    with pytest.raises((LockLost, OutOfSpace, OSError)):
        rehearsal.train("mine")
    assert other.exists()
    assert json.loads(path.read_text())["token"] == "another"


def test_a_live_run_is_neither_resumed_nor_forked(rehearsal: Rehearsal) -> None:
    def others_try() -> None:
        for options in ({}, {"fork": "other"}):
            with pytest.raises(PreflightError, match=f"in use by process {os.getpid()} on"):
                rehearsal.resume("mine", **options)

    rehearsal.troubles["step 3"] = others_try
    assert rehearsal.train("mine") == 0
    assert rehearsal.steps("mine") == [0, 1, 2, 3, 4]
    with RunLock(rehearsal.runs / "mine"):
        pass


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file_limit() -> Callable[[int], None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size if size >= 0 else before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_without_room_end_the_run_or_wait(rehearsal: Rehearsal, file_limit: Callable[[int], None]) -> None:
    rehearsal.troubles["step 3"] = lambda: file_limit(100)
    with pytest.raises(OutOfSpace, match=f"the metrics of step 3 were not written: {rehearsal.runs / 'stops'} has no"):
        rehearsal.train("stops")
    file_limit(-1)
    assert rehearsal.steps("stops") == [0, 1, 2]
    assert rehearsal.saved("stops") == ["step_000001", "step_000002"]
    rehearsal.train("whole")
    rehearsal.troubles = {"step 3": lambda: file_limit(100), "step 4": lambda: file_limit(-1)}
    assert rehearsal.train("waits", 'checkpoint.on_full_disk="continue"') == 0
    assert rehearsal.result("waits") == rehearsal.result("whole")
    assert rehearsal.saved("waits") == ["step_000002", "step_000004"]
    said = [event["message"] for event in rehearsal.events("waits") if event["event"] == "warning"]
    assert "the metrics of step 3 wait for room on the disk, training goes on" in said[0]
    assert "the checkpoint of step 3 was not written, training goes on" in said[1]


def test_metrics_that_never_find_room_are_an_error_in_the_end(
    rehearsal: Rehearsal, file_limit: Callable[[int], None]
) -> None:
    rehearsal.troubles["step 3"] = lambda: file_limit(100)
    settings = ('checkpoint.on_full_disk="continue"', "checkpoint.export=false", "checkpoint.keep_last=9")
    with pytest.raises(OutOfSpace, match="the metrics of the last steps were not written"):
        rehearsal.train("mine", *settings)
    file_limit(-1)
    assert rehearsal.saved("mine") == ["step_000001", "step_000002"]
    assert rehearsal.resume("mine") == 0
    assert rehearsal.steps("mine") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [NO_SPACE, OutOfSpace("a rank has no room")])
def test_a_checkpoint_without_room_ends_the_run_or_is_left_out_and_the_last_good_one_stays(
    rehearsal: Rehearsal, error: Exception
) -> None:
    rehearsal.troubles["save step_000003"] = fails_with(error)
    with pytest.raises(OutOfSpace, match="the checkpoint of step 3 was not written: "):
        rehearsal.train("stops")
    assert rehearsal.saved("stops") == ["step_000001", "step_000002"]
    rehearsal.troubles["save step_000003"] = fails_with(error)
    assert rehearsal.train("goes-on", 'checkpoint.on_full_disk="continue"') == 0
    assert rehearsal.saved("goes-on") == ["step_000002", "step_000004"]
    assert rehearsal.resume("stops") == 0
    assert rehearsal.result("stops") == rehearsal.result("goes-on")


IN_BACKGROUND = "checkpoint.background=true"


def test_a_run_that_saves_in_the_background_has_the_same_results_and_checkpoints(rehearsal: Rehearsal) -> None:
    settings = ("run.max_steps=5", "checkpoint.interval=2", "checkpoint.keep_last=9")
    assert rehearsal.train("at-once", *settings) == 0
    rehearsal.seen.clear()
    assert rehearsal.train("behind", *settings, IN_BACKGROUND) == 0
    order = ["copy step_000002", "step 3", "step 4", "write step_000002", "copy step_000004", "step 5"]
    assert rehearsal.seen[3:] == [*order, "write step_000004", "save step_000005", "export"]
    assert rehearsal.result("behind") == rehearsal.result("at-once")
    for name in rehearsal.saved("at-once"):
        folders = [rehearsal.folder(run).checkpoints / name for run in ("at-once", "behind")]
        assert contents(folders[0], "MANIFEST") == contents(folders[1], "MANIFEST")


def test_a_checkpoint_in_the_background_without_room_ends_the_run_in_a_later_step_or_is_left_out(
    rehearsal: Rehearsal,
) -> None:
    settings = ("run.max_steps=7", "checkpoint.interval=2", IN_BACKGROUND)
    rehearsal.troubles["write step_000004"] = fails_with(NO_SPACE)
    with pytest.raises(OutOfSpace, match="the checkpoint of step 4 was not written: "):
        rehearsal.train("stops", *settings)
    assert rehearsal.steps("stops") == [0, 1, 2, 3, 4, 5, 6]
    assert rehearsal.saved("stops") == ["step_000002"]
    rehearsal.troubles["write step_000004"] = fails_with(NO_SPACE)
    assert rehearsal.train("goes-on", *settings, 'checkpoint.on_full_disk="continue"') == 0
    assert rehearsal.saved("goes-on") == ["step_000006", "step_000007"]
    assert rehearsal.resume("stops") == 0
    assert rehearsal.result("stops") == rehearsal.result("goes-on")


def test_a_run_that_fails_completes_the_checkpoint_under_way(rehearsal: Rehearsal) -> None:
    rehearsal.troubles["step 3"] = fails_with(EngineError("the engine is gone"))
    with pytest.raises(EngineError, match="the engine is gone"):
        rehearsal.train("mine", "checkpoint.interval=2", IN_BACKGROUND)
    assert rehearsal.saved("mine") == ["step_000002"]
    rehearsal.troubles |= {"step 3": fails_with(EngineError("gone again")), "write step_000002": fails_with(NO_SPACE)}
    with pytest.raises(EngineError, match="gone again"):
        rehearsal.train("other", "checkpoint.interval=2", IN_BACKGROUND)
    assert rehearsal.saved("other") == []


def test_ctrl_c_waits_for_the_checkpoint_under_way(rehearsal: Rehearsal) -> None:
    settings = ("checkpoint.interval=2", "checkpoint.save_on_exit=false", IN_BACKGROUND)
    rehearsal.troubles["step 3"] = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert rehearsal.train("mine", *settings) == 130
    assert rehearsal.saved("mine") == ["step_000002"]
    rehearsal.troubles |= {
        "step 3": lambda: os.kill(os.getpid(), signal.SIGINT),
        "write step_000002": lambda: os.kill(os.getpid(), signal.SIGINT),  # a second one
    }
    assert rehearsal.train("aborted", *settings) == 130
    assert rehearsal.saved("aborted") == []


def test_a_resume_does_not_ask_for_the_room_that_its_own_checkpoints_take(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal.train("mine")
    needed = total(make_budget(start.resumed_config(rehearsal.folder("mine"), []), 0.0).disk)
    free = Machine(memory=2**60, shared=2**60, disk=needed - rehearsal.folder("mine").saved_bytes())
    monkeypatch.setattr(start, "this_machine", lambda folder: free)
    assert rehearsal.resume("mine", max_steps=5) == 0
    monkeypatch.setattr(start, "this_machine", lambda folder: replace(free, disk=0.0))
    with pytest.raises(PreflightError, match="the run would write"):
        rehearsal.resume("mine", max_steps=6)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_run_without_a_checkpoint_does_not_recommend_a_resume_and_is_not_started_over(
    rehearsal: Rehearsal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsal.train("mine", "checkpoint.interval=0", "checkpoint.save_on_exit=false") == 0
    said = capsys.readouterr().out
    assert "finished 4 of 4 steps" in said
    assert "tqppo resume" not in said
    assert "\nmetrics" in said
    assert "\ncheckpoints" not in said, "there are none"
    before = contents(rehearsal.runs / "mine")
    with pytest.raises(CheckpointError, match="there is no checkpoint") as refused:
        rehearsal.resume("mine", max_steps=8)
    assert refused.value.exit_code == 5
    assert contents(rehearsal.runs / "mine") == before
    assert rehearsal.train("saved") == 0
    assert "tqppo resume saved --max-steps 8" in capsys.readouterr().out


def test_a_config_that_finds_no_room_is_not_left_half_written(
    rehearsal: Rehearsal, file_limit: Callable[[int], None]
) -> None:
    file_limit(1000)  # enough for the lock
    with pytest.raises(OutOfSpace, match="has no room for"):
        rehearsal.train("mine")
    assert [path.name for path in Path(rehearsal.runs / "mine").iterdir()] == [".lock"]
