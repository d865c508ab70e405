"""Run folders: a name is never used twice, every start has its own logs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tqppo.errors import PreflightError, UsageError
from tqppo.run.folder import RunFolder, new_run


def trained(folder: Path) -> RunFolder:
    """A run with two steps and a checkpoint."""
    run = new_run(folder, "mine", preset="quickstart", model="tiny")
    run.config.write_text("")
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    (run.checkpoints / "step_000002").mkdir(parents=True)
    return run


def test_a_taken_name_is_refused_with_the_way_to_go_on(tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(UsageError, match=r"with 2 steps\. Go on with it: `tqppo resume mine`; replace it: --overwrite"):
        new_run(tmp_path, "mine", preset="", model="tiny")
    make_export(run, "2")
    run.replace_export(2)
    with pytest.raises(UsageError, match="Train it longer: `tqppo resume mine --max-steps 4`"):
        new_run(tmp_path, "mine", preset="", model="tiny")


def test_a_run_without_a_step_does_not_hold_its_name(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    run.config.write_text("")
    run.metrics.write_text('{"step": 0}\n')
    run.next_attempt()
    again = new_run(tmp_path, "mine", preset="", model="tiny")
    again.clear()
    assert list(again.path.iterdir()) == []


def test_overwriting_removes_a_run_but_never_another_folder(tmp_path: Path) -> None:
    trained(tmp_path)
    new_run(tmp_path, "mine", preset="", model="tiny", overwrite=True).clear()
    assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="is no run"):
        new_run(tmp_path, "data", preset="", model="tiny", overwrite=True)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="cannot be made: File name too long"):
        new_run(tmp_path, "x" * 300, preset="", model="tiny")


def make_export(run: RunFolder, content: str) -> None:
    run.partial_export.mkdir(parents=True)
    (run.partial_export / "config.json").write_text(content)


def nothing_yet(run: RunFolder) -> None:
    """Killed while the new export was made, or synced."""


def note_is_gone(run: RunFolder) -> None:
    (run.export.parent / ".step").unlink()


def old_one_is_away(run: RunFolder) -> None:
    note_is_gone(run)
    run.export.rename(run.export.with_name(".before-hf"))


def new_one_is_there(run: RunFolder) -> None:
    old_one_is_away(run)
    run.partial_export.rename(run.export)


@pytest.mark.parametrize(
    ("killed", "left"), [(nothing_yet, "3"), (note_is_gone, "3"), (old_one_is_away, "3"), (new_one_is_there, "6")]
)
def test_an_export_that_is_cut_short_is_never_taken_for_another_step(
    tmp_path: Path, killed: Callable[[RunFolder], None], left: str
) -> None:
    """However far a kill let it come: one export is whole, and that of step 6 is not taken for made."""
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    make_export(run, "3")
    run.replace_export(3)
    make_export(run, "6")
    killed(run)
    assert run.exported_step in (None, 3)
    run.remove_partial_export()
    assert (run.export / "config.json").read_text() == left
    assert [path.name for path in run.export.parent.iterdir() if path.name != ".step"] == ["hf"]


def test_an_export_is_on_the_disk_before_its_step_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    make_export(run, "3")
    synced, fsync = list[str](), os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    run.replace_export(3)
    assert synced[:2] == ["config.json", ".partial-hf"]
    assert synced[2] == "..step.draft"


def test_an_export_that_is_gone_is_of_no_step(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    make_export(run, "3")
    run.replace_export(3)
    shutil.rmtree(run.export)
    assert run.exported_step is None


def test_an_export_replaces_the_one_before_and_its_step_is_known(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    assert run.exported_step is None
    for step in (3, 6):
        make_export(run, str(step))
        run.replace_export(step)
        assert run.exported_step == step
        assert (run.export / "config.json").read_text() == str(step)
    assert sorted(path.name for path in run.export.parent.iterdir()) == [".step", "hf"]


def test_an_unnamed_run_is_called_after_preset_and_model(tmp_path: Path) -> None:
    first = new_run(tmp_path, "", preset="grpo-7b", model="Qwen/Qwen2.5-7B")
    second = new_run(tmp_path, "", preset="grpo-7b", model="Qwen/Qwen2.5-7B")
    assert first.name.startswith("grpo-7b-qwen2.5-7b-")
    assert first.name != second.name


def test_every_attempt_has_its_own_logs(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    (run.path / "logs" / "attempt_of_mine").mkdir(parents=True)
    assert run.next_attempt().name == "attempt_1"
    second = run.next_attempt()
    assert second.name == "attempt_2"
    assert (run.path / "logs" / "latest").resolve() == second.resolve()
