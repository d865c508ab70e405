"""What a resumed or forked run may change, and what it takes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.show.export import resolved_toml
from tqppo.errors import CheckpointError, PreflightError
from tqppo.run.checkpoint import Checkpoint
from tqppo.run.folder import RunFolder, new_run
from tqppo.run.start import fork_run, refuse_what_is_not_there, resumed_config


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = new_run(tmp_path, "mine", preset="quickstart", model="tiny")
    folder.config.write_text(resolved_toml(compile_config("quickstart", [], [], {}).draft))
    folder.metrics.write_text('{"step": 0}\n')
    return folder


def test_a_resumed_run_may_last_longer(run: RunFolder) -> None:
    assert resumed_config(run, ["run.max_steps=900"]).run.max_steps == 900


def test_a_setting_that_would_change_the_result_is_refused_with_both_values(run: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"actor\.lr: .* → 0\.5"):
        resumed_config(run, ["run.max_steps=900", "actor.lr=0.5"])


def test_a_fork_has_the_config_the_metrics_and_the_checkpoint(run: RunFolder) -> None:
    saved = run.checkpoints / "step_000003"
    saved.mkdir(parents=True)
    (saved / "driver.json").write_text("{}")
    fork = fork_run(run, "other", Checkpoint(saved, 3))
    assert fork.path == run.path.parent / "other"
    assert fork.config.read_text() == run.config.read_text()
    assert fork.metrics.read_text() == run.metrics.read_text()
    assert (fork.checkpoints / "step_000003" / "driver.json").is_file()


def test_a_mode_without_a_trainer_is_refused_by_the_name_of_its_preset() -> None:
    config = compile_config("distill-tiny", [], [], {}).config
    assert config is not None
    with pytest.raises(PreflightError, match="distill-tiny: "):
        refuse_what_is_not_there(config, "distill-tiny")
