"""What a resumed run may change, what is refused before anything starts, and forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.show.export import resolved_toml
from tqppo.errors import CheckpointError, PreflightError, UsageError
from tqppo.run import start
from tqppo.run.checkpoint import CheckpointStore
from tqppo.run.folder import RunFolder, new_run
from tqppo.run.lock import RunLock


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = new_run(tmp_path / "runs", "mine", preset="quickstart", model="tiny")
    folder.config.write_text(resolved_toml(compile_config("quickstart", [], [], {}).draft))
    return folder


def test_a_resumed_run_may_go_on_for_longer(folder: RunFolder) -> None:
    config = start.resumed_config(folder, ["run.max_steps=900", "storage.timeout_s=5.0", "checkpoint.interval=3"])
    assert config.run.max_steps == 900


def test_settings_that_change_the_result_are_named_with_both_values(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError) as refused:
        start.resumed_config(folder, ["actor.lr=0.5", "run.seed=9"])
    assert "run.seed: 0 → 9" in str(refused.value)
    assert "actor.lr:" in str(refused.value)


def test_a_fork_has_everything_that_a_resume_needs(folder: RunFolder) -> None:
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    folder.metrics.write_text('{"step": 3}\n')
    store = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)
    store.write(3, lambda path: None, {"cursor": 1})
    fork = new_run(folder.path.parent, "other", preset="", model="")
    copied = start.copy_run(folder, fork, store.newest())
    assert (copied.step, copied.folder.parent) == (3, fork.checkpoints.resolve())
    assert fork.metrics.read_bytes() == folder.metrics.read_bytes()
    with pytest.raises(UsageError, match="there is a run at"):
        new_run(folder.path.parent, "other", preset="", model="")


def test_a_fork_that_cannot_be_copied_whole_leaves_nothing(folder: RunFolder) -> None:
    store = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)
    store.write(3, lambda path: None, {"cursor": 1})
    found = store.newest()
    folder.config.write_text("")  # after the check: the copy is not what the manifest lists
    fork = new_run(folder.path.parent, "other", preset="", model="")
    with pytest.raises(CheckpointError, match=r"other/config\.resolved\.toml is corrupt"):
        start.copy_run(folder, fork, found)
    assert not fork.path.exists()


@pytest.mark.parametrize(("damaged", "is_advised"), [("config.resolved.toml", False), ("driver.json", True)])
def test_starting_over_is_advised_unless_the_config_itself_is_damaged(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, damaged: str, is_advised: bool
) -> None:
    monkeypatch.setenv("TQPPO__RUN__DIR", str(folder.path.parent))
    CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: None, {})
    next(folder.path.rglob(damaged)).write_text("")
    with pytest.raises(CheckpointError, match=f"{damaged} is corrupt") as refused:
        start.resume("mine", [])
    assert (f"tqppo train --config {folder.config}" in str(refused.value)) == is_advised


def test_a_second_resume_is_refused_before_it_reads_or_writes_anything(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQPPO__RUN__DIR", str(folder.path.parent))
    step = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: None, {})
    for path in ("mine", str(step), str(folder.checkpoints / "latest")):
        with RunLock(folder.path), pytest.raises(PreflightError, match="is in use by process"):
            start.resume(path, [])
        with RunLock(folder.path), pytest.raises(PreflightError, match="is in use by process"):
            start.resume(path, [], fork="other")
    assert not (folder.path / "logs").exists()
    assert not (folder.path.parent / "other").exists()
