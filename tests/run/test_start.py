"""What a resumed run may change, what is refused before anything starts, and forks."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run.rehearsal import contents

from tqppo.config.compile import compile_config
from tqppo.config.show.export import resolved_toml
from tqppo.errors import CheckpointError, PreflightError, UsageError
from tqppo.run import start
from tqppo.run.checkpoint import Checkpoint, CheckpointStore
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


MEMORY_AND_PLACEMENT = [
    ("actor.ranks", "2"),
    ("actor.micro_batch_tokens", "512"),
    ("actor.gradient_checkpointing", "true"),
    ("rollout.replicas", "2"),
]


@pytest.mark.parametrize(("key", "value"), MEMORY_AND_PLACEMENT)
def test_memory_and_placement_may_change_with_a_note_that_the_bits_may_too(
    folder: RunFolder, key: str, value: str
) -> None:
    changes = [f"{key}={value}"]
    start.resumed_config(folder, changes)
    (note,) = start.rounding(folder, changes)
    assert note.startswith(f"{key}: ")
    assert f"→ {value.title() if value == 'true' else value}." in note
    assert "up to rounding, and no longer to the bit" in note


def test_what_changes_no_result_needs_no_note(folder: RunFolder) -> None:
    assert start.rounding(folder, ["cluster.cpus_per_worker=0.5", "run.max_steps=900"]) == []


@pytest.mark.parametrize(("steps", "in_flight", "said"), [(9, 0, True), (9, 2, False), (3, 0, False), (4, 1, False)])
def test_a_run_that_had_ended_says_that_its_next_groups_are_fresher(
    tmp_path: Path, steps: int, in_flight: int, said: bool
) -> None:
    config = compile_config(None, [], ["rollout.ahead=2", f"run.max_steps={steps}"], {}).draft
    (tmp_path / "driver.json").write_text(json.dumps({"ahead": [{}] * in_flight}))
    notes = start.refilling(config, Checkpoint(tmp_path, 3))
    assert bool(notes) == said
    assert not said or "the next 2 train" in notes[0]


def test_a_fork_with_other_memory_settings_goes_on_with_the_run(folder: RunFolder) -> None:
    assert start.changed_results(folder, ["actor.ranks=2", "actor.lr=0.5"]) == ["  actor.lr: 0.001 → 0.5"]


def test_a_fork_has_everything_that_a_resume_needs(folder: RunFolder) -> None:
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    folder.metrics.write_text('{"step": 3}\n')
    store = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)
    store.write(3, lambda path: {}, {"cursor": 1})
    fork = new_run(folder.path.parent, "other", preset="", model="")
    copied = start.copy_run(folder, fork, store.newest())
    assert (copied.step, copied.folder.parent) == (3, fork.checkpoints.resolve())
    assert fork.metrics.read_bytes() == folder.metrics.read_bytes()
    with pytest.raises(UsageError, match="there is already a run at"):
        new_run(folder.path.parent, "other", preset="", model="")


def test_a_fork_that_cannot_be_copied_whole_leaves_nothing(folder: RunFolder) -> None:
    store = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)
    store.write(3, lambda path: {}, {"cursor": 1})
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
    CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: {}, {})
    next(folder.path.rglob(damaged)).write_text("")
    with pytest.raises(CheckpointError, match=f"{damaged} is corrupt") as refused:
        start.resume("mine", [])
    assert (f"tqppo train --config {folder.config}" in str(refused.value)) == is_advised


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"format": 99},
            "step_000003 has checkpoint format 99, and this tqppo reads format 3: resume with",
        ),
        ({"files": {}}, "step_000003/MANIFEST.json is corrupt: it does not list driver.json"),
        ({"step": True}, "step_000003/MANIFEST.json is corrupt: TypeError: True is not a whole number"),
        ({"step": 2}, "step_000003/MANIFEST.json is corrupt: it says step 2"),
        ({"run_files": {"/etc/passwd": {}}}, "MANIFEST.json is corrupt: it names a file outside of its folder"),
        ({"run_files": {"../x": {}}}, "MANIFEST.json is corrupt: it names a file outside of its folder"),
        ({"run_files": {}}, "config.resolved.toml is not in"),
    ],
)
def test_a_manifest_that_cannot_be_believed_ends_with_5_names_the_file_and_changes_nothing(
    folder: RunFolder, changes: dict[str, object], named: str
) -> None:
    store = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)
    step = store.write(3, lambda path: {}, {})
    folder.metrics.write_text('{"step": 3}\n{"step": 4}\n')
    manifest = step / "MANIFEST.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))
    before = contents(folder.path)
    for path in (folder.path, step, folder.checkpoints / "latest"):
        for fork in ("", "other"):
            with pytest.raises(CheckpointError, match=re.escape(named)) as refused:
                start.resume(str(path), [], fork=fork)
            assert refused.value.exit_code == 5
            assert ("tqppo train" in str(refused.value)) == ("corrupt" in named and path != step)
    assert contents(folder.path) == before
    assert not (folder.path.parent / "other").exists()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [_pipe, _endless, Path.mkdir])
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_run_s_file_that_has_no_end_is_refused_before_it_is_read(
    folder: RunFolder, name: str, put: Callable[[Path], None]
) -> None:
    CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: {}, {})
    put(folder.path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file; nothing was changed"):
        start.resume(str(folder.path), [])
    assert folder.checkpoints.joinpath("step_000003").is_dir()


def test_a_fork_that_is_interrupted_leaves_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume)
    store.write(3, lambda path: {}, {})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start.resume(str(folder.path), [], fork="other")
    assert not (folder.path.parent / "other").exists()


def test_a_second_resume_is_refused_before_it_reads_or_writes_anything(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQPPO__RUN__DIR", str(folder.path.parent))
    step = CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: {}, {})
    for path in ("mine", str(step), str(folder.checkpoints / "latest")):
        with RunLock(folder.path), pytest.raises(PreflightError, match="is in use by process"):
            start.resume(path, [])
        with RunLock(folder.path), pytest.raises(PreflightError, match="is in use by process"):
            start.resume(path, [], fork="other")
    assert not (folder.path / "logs").exists()
    assert not (folder.path.parent / "other").exists()


def test_a_fork_does_not_replace_a_run_that_trained_under_its_name_meanwhile(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes the same fork, trains and ends, before this one has the lock."""
    CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: {}, {})
    other = RunFolder(folder.path.parent / "other")

    def another_was_faster(path: Path) -> RunLock:
        if path == other.path:
            other.config.write_text("")
            other.metrics.write_text('{"step": 1}\n')
        return RunLock(path)

    monkeypatch.setattr(start, "RunLock", another_was_faster)
    with pytest.raises(UsageError, match="there is already a run at"):
        start.resume(str(folder.path), [], fork="other")
    assert other.metrics.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("name", ["../../elsewhere", "\x1b[2J", "a/b"])
def test_a_fork_stays_among_the_runs(folder: RunFolder, name: str) -> None:
    CheckpointStore(folder.checkpoints, run_files=folder.files_of_resume).write(3, lambda path: {}, {})
    with pytest.raises(UsageError, match="cannot be the name of a run"):
        start.resume(str(folder.path), [], fork=name)
