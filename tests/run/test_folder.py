"""Run folders: a name is never used twice, every start has its own logs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tqppo.errors import PreflightError, UsageError
from tqppo.run.folder import RunFolder, new_run


def make_export(run: RunFolder, content: str) -> None:
    run.exported.partial.mkdir(parents=True)
    (run.exported.partial / "config.json").write_text(content)


def trained(folder: Path) -> RunFolder:
    """A run with two steps and a checkpoint."""
    run = new_run(folder, "mine", preset="quickstart", model="tiny")
    run.config.write_text("")
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    (run.checkpoints / "step_000002").mkdir(parents=True)
    return run


def test_a_taken_name_is_refused_with_the_way_to_go_on(tmp_path: Path) -> None:
    run = trained(tmp_path)
    with pytest.raises(UsageError, match=r"with 2 steps\. Continue it: `tqppo resume mine`; replace it: --overwrite"):
        new_run(tmp_path, "mine", preset="", model="tiny")
    make_export(run, "2")
    run.exported.replace(2)
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
    with pytest.raises(UsageError, match="is not a run's folder"):
        new_run(tmp_path, "data", preset="", model="tiny", overwrite=True)


def test_an_exported_model_holds_the_name_even_without_metrics_and_checkpoints(tmp_path: Path) -> None:
    run = trained(tmp_path)
    make_export(run, "2")
    run.exported.replace(2)
    run.metrics.unlink()
    shutil.rmtree(run.checkpoints)
    for message in ("with 2 steps", "with 0 steps"):
        with pytest.raises(UsageError, match=message):
            new_run(tmp_path, "mine", preset="", model="tiny")
        (run.export.parent / ".step").unlink(missing_ok=True)


def test_a_run_that_is_removed_halfway_is_still_known_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config goes last."""
    run = trained(tmp_path)
    for name in "abcdefgh":
        (run.path / name).write_text("")

    def killed_at_the_config(path: Path) -> None:
        if path == run.config:
            raise KeyboardInterrupt
        os.unlink(path)

    monkeypatch.setattr(Path, "unlink", killed_at_the_config)
    with pytest.raises(KeyboardInterrupt):
        run.clear()
    assert list(run.path.iterdir()) == [run.config]


def test_folders_that_only_look_like_checkpoints_are_no_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    run.config.write_text("")
    (run.checkpoints / "step_of_mine").mkdir(parents=True)
    assert (run.trained_steps, run.is_saved) == (0, False)


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", "/tmp/x", "\x1b[2J", "a\0b", "-x", ".x", "a\n"])
def test_a_name_that_leaves_the_folder_or_cannot_be_printed_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a run") as refused:
        new_run(tmp_path / "runs", name, preset="", model="tiny")
    assert "\x1b" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_the_name_of_an_unnamed_run_is_plain_whatever_its_preset_and_model_are_called(tmp_path: Path) -> None:
    run = new_run(tmp_path, "", preset="../\x1b[2J", model="a/..\x1bb")
    assert re.fullmatch(r"2j-b-[0-9]{4}-[0-9]{6}", run.name)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="cannot be made: File name too long"):
        new_run(tmp_path, "x" * 300, preset="", model="tiny")


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
