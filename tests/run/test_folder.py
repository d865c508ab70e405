"""Run folders: a name is never used twice, every start has its own logs."""

from __future__ import annotations

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
    made = run.export.with_name(".partial-hf")
    made.mkdir(parents=True)
    run.replace_export(made, 2)
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


def test_an_export_replaces_the_one_before_and_its_step_is_known(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    assert run.exported_step is None
    for step in (3, 6):
        made = run.export.with_name(".partial-hf")
        made.mkdir(parents=True)
        (made / "config.json").write_text(str(step))
        run.replace_export(made, step)
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
