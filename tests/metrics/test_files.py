"""The run's JSONL files: the same bytes for the same metrics, and a clean cut on resume."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from disks import files_of_at_most

from tqppo.errors import OutOfSpace
from tqppo.metrics import files as metrics
from tqppo.metrics.events import GroupLeftOut, NothingToTrain, ShortBatch
from tqppo.metrics.files import EventLog, MetricsLog


def _write(path: Path, steps: range, seconds: float = 1.0) -> None:
    log = MetricsLog(path)
    for step in steps:
        log.write(step, {"timing_s/step": seconds, "actor/kl": step / 3, "perf/throughput": 1 / seconds})


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"b": 2, "a": 0.1})
    (found,) = metrics.read(tmp_path / "metrics.jsonl")
    assert metrics.without_timings(found) == {"step": 1, "a": 0.1, "b": 2}
    assert abs(time.time() - found["time"]) < 60


def test_values_that_are_not_finite_become_null() -> None:
    assert metrics.line(1, {"loss": float("nan"), "x": float("inf")}) == b'{"step": 1, "loss": null, "x": null}\n'


def test_a_cut_run_that_goes_on_has_the_bytes_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    _write(whole, range(1, 7))
    _write(cut, range(1, 5), seconds=7.0)
    with cut.open("ab") as file:
        file.write(b'{"step": 5, "actor/k')  # killed in the middle of a line
    assert [each["step"] for each in metrics.read(cut)] == [1, 2, 3, 4]
    metrics.cut(cut, 3)
    _write(cut, range(4, 7))
    assert whole.read_bytes() != cut.read_bytes()
    assert metrics.comparable(whole) == metrics.comparable(cut)


def test_cutting_before_the_first_step_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(0, 3))
    metrics.cut(path, -1)
    assert path.read_bytes() == b""
    metrics.cut(tmp_path / "missing.jsonl", 3)


def test_joined_lines_are_repaired_and_the_file_as_it_was_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = '{"step": 1}\n{"step": 2, "a{"step": 2}\n{"step": 3}\n{"step": 4}\n'
    for copy in ("metrics.jsonl.damaged", "metrics.jsonl.damaged.2"):  # a second copy does not replace the first
        path.write_text(damaged)
        assert metrics.read(path) == [{"step": 1}, {"step": 3}, {"step": 4}]
        assert metrics.cut(path, 3) == [f"{path}: line 2 is damaged; the file as it was is {tmp_path / copy}"]
        assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
        assert (tmp_path / copy).read_text() == damaged


@pytest.mark.parametrize("line", ["\0" * 40, '{"step": 1e999}', '{"step": null}', "[" * 100_000, "\udcff", "7"])
def test_lines_of_nonsense_are_left_out_and_their_steps_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'.encode(errors="surrogateescape"))
    damaged, missing = metrics.cut(path, 3)
    assert "line 2 is damaged" in damaged
    assert missing == f"{path} has no line for 1 of 3 steps, the first of them step 2"
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_metrics_that_are_gone_are_noticed(tmp_path: Path) -> None:
    (said,) = metrics.cut(tmp_path / "metrics.jsonl", 4)
    assert "no line for 4 of 4 steps" in said


def test_a_line_does_not_join_the_one_that_a_kill_cut_short(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "sta')
    EventLog(tmp_path / "events.jsonl").write("end")
    cut_short, whole = (tmp_path / "events.jsonl").read_text().splitlines()
    assert cut_short == '{"time": 1, "event": "sta'
    assert json.loads(whole)["event"] == "end"


def test_lines_without_room_are_written_once_there_is_some(tmp_path: Path) -> None:
    log, events = MetricsLog(tmp_path / "metrics.jsonl"), EventLog(tmp_path / "events.jsonl")
    log.write(1, {})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with files_of_at_most(len(before) + 8):
        for step in (2, 3):
            with pytest.raises(OutOfSpace):
                log.write(step, {})
        events.write("warning", message="the disk is full")  # does not end the run
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    log.sync()
    events.write("end")
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_a_damaged_tail_is_repaired_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"\n')
    assert metrics.cut(path, 1) == []
    assert path.read_text() == '{"step": 1}\n'


def test_events_carry_a_time_and_their_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("checkpoint", step=3, path=tmp_path)
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["step"], event["path"]) == ("checkpoint", 3, str(tmp_path))
    assert event["time"] > 0


def test_spread_of_values() -> None:
    assert metrics.spread("critic/score", [1.0, 0.0, 0.5]) == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
    }
    assert metrics.spread("critic/score", []) == {}


def test_a_typed_event_is_a_line_with_its_name_and_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.report(GroupLeftOut(step=4, prompt="p1", outcome="failed", reason="it broke", rows=2))
    (found,) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert found.pop("time") > 0
    assert found == {
        "event": "group_left_out",
        "step": 4,
        "prompt": "p1",
        "outcome": "failed",
        "reason": "it broke",
        "rows": 2,
    }


def test_what_a_user_should_know_is_a_notice_and_what_would_flood_the_screen_is_not() -> None:
    assert GroupLeftOut(4, "p1", "failed", "it broke", 2).notice == ""
    assert "2 mini-batches of the actor" in NothingToTrain(4, "actor", 2).notice
    assert "and 3 without signal" in ShortBatch(4, 8, 5, 3, 4).notice
