"""A fork with other settings starts from the checkpoint's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doctor.saved_runs import make_run
from transformers import AutoModelForCausalLM

from tqppo.errors import ConfigError, PreflightError, UsageError
from tqppo.run.branch import branch, what_changes
from tqppo.run.checkpoint import CheckpointStore
from tqppo.run.folder import RunFolder
from tqppo.run.start import changed_results, resume


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path, shift=0.5)


def test_the_new_run_has_the_checkpoint_s_weights_and_the_other_settings(run: RunFolder, tmp_path: Path) -> None:
    forked = RunFolder(tmp_path / "other")
    found = CheckpointStore(run.checkpoints, run_files=run.files_of_resume).newest(lambda message: None)
    config = branch(run, forked, found, ["actor.lr=0.5"]).draft
    assert (config.actor.lr, config.model.path, config.warm_start.steps) == (0.5, str(forked.model.resolve()), 0)
    before = AutoModelForCausalLM.from_pretrained(run.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(forked.model).state_dict()
    assert all(torch.allclose(after[name], value + 0.5, atol=1e-6) for name, value in before.items())


def test_a_fork_says_what_is_not_continued(run: RunFolder) -> None:
    changed = changed_results(run, ["actor.lr=0.5", "run.max_steps=9"])
    assert changed == ["  actor.lr: 0.001 → 0.5"]
    said = what_changes(run, 3, changed)
    assert "from the weights of step 3 of mine" in said
    assert "the optimizer" in said


def test_another_model_and_settings_that_do_not_compile_are_refused(run: RunFolder, tmp_path: Path) -> None:
    found = CheckpointStore(run.checkpoints, run_files=run.files_of_resume).newest(lambda message: None)
    with pytest.raises(UsageError, match=r"model\.path cannot be changed"):
        branch(run, RunFolder(tmp_path / "other"), found, ["model.path=x"])
    with pytest.raises(ConfigError, match=r"actor\.lr"):
        branch(run, RunFolder(tmp_path / "other"), found, ["actor.lr=-1"])


def test_a_fork_that_this_machine_has_no_room_for_leaves_no_folder(run: RunFolder) -> None:
    with pytest.raises(PreflightError, match="E612"):
        resume(str(run.path), ["rollout.replicas=10_000"], fork="large")
    assert not (run.path.parent / "large").exists()
