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
from tqppo.errors import PreflightError
from tqppo.run.folder import RunFolder
from tqppo.run.lock import RunLock
from tqppo.run.summary import age, is_running, remove, runs_in, size, summarise


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


def test_ages_and_sizes_have_one_unit() -> None:
    assert [age(0, now) for now in (5, 130, 7300, 200_000)] == ["5 s", "2 min", "2 h", "2 d"]
    assert [size(each) for each in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
