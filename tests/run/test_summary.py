"""Runs as their files show them, and `tqppo runs` on top."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.config.compile import compile_config
from tqppo.config.show.export import resolved_toml
from tqppo.errors import PreflightError, UsageError
from tqppo.metrics.files import EventLog
from tqppo.run.folder import RunFolder
from tqppo.run.lock import RunLock
from tqppo.run.picture import progress_of
from tqppo.run.summary import age, is_running, remove, runs_in, summarise


def make(runs: Path, name: str, *, steps: int, most: int, saved: bool = True) -> RunFolder:
    run = RunFolder(runs / name)
    run.path.mkdir(parents=True)
    run.config.write_text(resolved_toml(compile_config("quickstart", [], [f"run.max_steps={most}"], {}).draft))
    lines = [{"step": step, "critic/score/mean": step / 10} for step in range(1, steps + 1)]
    lines += [{"step": steps, "val-core/sort/acc/mean@1": 0.25, "val-core/sort/acc/greedy": 0.5}] if steps else []
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if saved and steps:
        (run.checkpoints / f"step_{steps:06d}").mkdir(parents=True)
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for place, (name, steps, saved) in enumerate((("done", 4, True), ("half", 2, True), ("none", 0, False))):
        run = make(tmp_path, name, steps=steps, most=4, saved=saved)
        os.utime(run.config, (1000.0 + place, 1000.0 + place))
    return tmp_path


def test_states_steps_and_scores_follow_from_the_files(runs: Path) -> None:
    done, half, none = (summarise(run) for run in runs_in(runs))
    assert [(each.name, each.state, each.steps) for each in (done, half, none)] == [
        ("done", "finished", 4),
        ("half", "stopped", 2),
        ("none", "failed", 0),
    ]
    assert (done.score_name, done.last_score, done.best_step) == ("val-core/sort/acc/mean@1", 0.25, 4)
    assert none.last_score is None
    assert done.checkpoints == ["step_000004"]


def test_the_last_step_is_that_of_the_last_attempt(runs: Path) -> None:
    half = RunFolder(runs / "half")
    log = EventLog(half.events)
    log.write("start", step=0, max_steps=4)
    log.write("start", step=1, max_steps=2)
    with half.events.open("ab") as file:
        file.write(b'{"event": "start", "max_st')  # a kill cut this line short
    assert (summarise(half).max_steps, summarise(half).state) == (2, "finished")
    assert progress_of(half).max_steps == 2


def test_a_run_that_a_process_works_on_is_running_and_cannot_be_deleted(runs: Path) -> None:
    run = RunFolder(runs / "done")
    assert not is_running(run)
    with RunLock(run.path, settle_s=0.0):
        assert summarise(run).state == "running"
        with pytest.raises(PreflightError):
            remove(run)
    assert remove(run) > 0
    assert not run.path.exists()


def test_the_commands_list_show_and_delete(runs: Path) -> None:
    cli = CliRunner()
    lines = cli.invoke(app, ["runs", "list", "--dir", str(runs)]).output.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "done", "half", "none"]
    shown = cli.invoke(app, ["runs", "show", "half", "--dir", str(runs)]).output
    assert "2 of 4" in shown
    assert "tqppo resume half" in shown
    assert json.loads(cli.invoke(app, ["runs", "show", "done", "--dir", str(runs), "--json"]).output)["steps"] == 4
    assert cli.invoke(app, ["runs", "rm", "half", "--dir", str(runs), "--yes"]).exit_code == 0
    assert not (runs / "half").exists()
    assert "no runs in" in cli.invoke(app, ["runs", "list", "--dir", str(runs / "other")]).output


def test_ages_have_one_unit() -> None:
    assert [age(0, now) for now in (5, 130, 7300, 200_000)] == ["5 s", "2 min", "2 h", "2 d"]


def test_listing_runs_changes_no_file_and_ends_no_run_on_another_machine(runs: Path) -> None:
    """Its lease has run out, because the machine was stopped for a minute; it goes on if its lock is as it was."""
    held = {"pid": 7, "host": "far", "since": "", "command": "", "machine": "another", "token": "abc"}
    (runs / "half" / ".lock").write_text(json.dumps(held))
    os.utime(runs / "half" / ".lock", (0, 0))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in runs.rglob("*") if path.is_file()}
    assert CliRunner().invoke(app, ["runs", "list", "--dir", str(runs)]).exit_code == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert {path for path in runs.rglob("*") if path.is_file()} == before.keys()


def test_a_checkpoint_s_folder_does_not_delete_its_run(runs: Path) -> None:
    (runs / "done" / "checkpoints" / "latest").symlink_to("step_000004")
    for part in ("checkpoints", "checkpoints/step_000004", "checkpoints/latest"):
        answer = CliRunner().invoke(app, ["runs", "rm", str(runs / "done" / part), "--dir", str(runs), "--yes"])
        assert answer.exit_code == 2
        assert "tqppo runs rm done" in answer.output
    assert (runs / "done" / "checkpoints" / "step_000004").is_dir()


def test_a_link_to_a_run_is_not_followed_to_delete_it(runs: Path) -> None:
    (runs / "link").symlink_to("done")
    with pytest.raises(UsageError, match="is not a run's folder"):
        remove(RunFolder(runs / "link"))
    assert (runs / "done" / "checkpoints" / "step_000004").is_dir()


def test_a_run_that_is_started_under_the_name_of_one_that_is_deleted_keeps_its_files(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = RunFolder.clear

    def another_starts(run: RunFolder) -> None:
        clear(run)
        make(runs, "done", steps=1, most=4)

    monkeypatch.setattr(RunFolder, "clear", another_starts)
    remove(RunFolder(runs / "done"))
    assert RunFolder(runs / "done").trained_steps == 1
    assert sorted(path.name for path in runs.iterdir()) == ["done", "half", "none"]


@pytest.mark.parametrize("config", [b"", b"\xff\xfe", b"run = 1", b"[run]\nmax_steps = 'x'", b"[" * 100_000])
def test_runs_with_damaged_files_are_listed(runs: Path, config: bytes) -> None:
    run = runs / "half"
    (run / "config.resolved.toml").write_bytes(config)
    (run / "checkpoints" / "step_of_mine").mkdir()
    (run / "checkpoints" / "step_").mkdir()
    (run / "metrics.jsonl").write_bytes(b'\xff\n{"step": 1e999}\n[1]\n{"step": 3}\n' + b"[" * 100_000 + b"\n")
    (run / "export").mkdir()
    os.mkfifo(run / "export" / ".step")
    answer = CliRunner().invoke(app, ["runs", "list", "--dir", str(runs)])
    assert answer.exit_code == 0, answer.exception
    assert "half" in answer.output
    assert summarise(RunFolder(run)).steps == 3


def test_names_of_runs_are_printed_as_text(runs: Path) -> None:
    (runs / "half").rename(runs / "\x1b[2Jhalf")
    for command in (["list"], ["list", "--json"], ["show", "\x1b[2Jhalf"]):
        answer = CliRunner().invoke(app, ["runs", *command, "--dir", str(runs)])
        assert answer.exit_code == 0
        assert "\x1b" not in answer.output
