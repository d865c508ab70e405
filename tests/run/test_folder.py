"""Run folders: a name is never used twice, every start has its own logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.errors import UsageError
from tqppo.run.folder import new_run


def test_a_taken_name_is_refused_with_the_way_to_go_on(tmp_path: Path) -> None:
    new_run(tmp_path, "mine", preset="quickstart", model="tiny")
    with pytest.raises(UsageError, match="tqppo resume --checkpoint mine"):
        new_run(tmp_path, "mine", preset="quickstart", model="tiny")


def test_an_unnamed_run_is_called_after_preset_and_model(tmp_path: Path) -> None:
    first = new_run(tmp_path, "", preset="grpo-7b", model="Qwen/Qwen2.5-7B")
    second = new_run(tmp_path, "", preset="grpo-7b", model="Qwen/Qwen2.5-7B")
    assert first.name.startswith("grpo-7b-qwen2.5-7b-")
    assert first.name != second.name


def test_every_attempt_has_its_own_logs(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine", preset="", model="tiny")
    assert run.next_attempt().name == "attempt_1"
    second = run.next_attempt()
    assert second.name == "attempt_2"
    assert (run.path / "logs" / "latest").resolve() == second.resolve()
