"""Run folders: a name is never used twice, every start has its own logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.errors import PreflightError, UsageError
from tqppo.run.folder import new_run


def test_a_taken_name_is_refused_with_the_way_to_go_on(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="quickstart", model="tiny")
    with pytest.raises(UsageError, match=r"already\. Choose another run\.name"):  # there is nothing to go on from
        new_run(tmp_path, "mine", preset="quickstart", model="tiny")
    (run.checkpoints / "step_000002").mkdir(parents=True)
    with pytest.raises(UsageError, match="tqppo resume --checkpoint mine"):
        new_run(tmp_path, "mine", preset="quickstart", model="tiny")


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
