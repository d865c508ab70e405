"""A mode of another package: one module, one entry point, and `tqppo` validates, plans and trains it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODE = '''
"""A mode without advantages that compare sessions: each reward counts as it is."""
from tqppo.dataflow import ACTOR_UPDATE, ESTIMATE, GENERATE, OLD_LOGPROBS, Mode

REINFORCE = Mode(
    "reinforce", "plain rewards", "my_mode_trainer:ReinforceTrainer", (GENERATE, OLD_LOGPROBS, ESTIMATE, ACTOR_UPDATE),
    advantage="reinforce_plus_plus",
)
'''
TRAINER = """
from __future__ import annotations

from dataclasses import dataclass

from tqppo import Stages


@dataclass(frozen=True)
class ReinforceTrainer:
    stages: Stages

    @classmethod
    def build(cls, stages: Stages) -> ReinforceTrainer:
        return cls(stages)

    def step(self, step: int) -> dict[str, float]:
        batch, metrics = self.stages.rollout.generate(step)
        batch, padded = self.stages.padding.fill(batch, step)
        batch = self.stages.actor.old_logprobs(batch)
        batch, estimated = self.stages.advantages.estimate(batch, step)
        metrics |= padded | estimated | self.stages.actor.update(batch, step)
        self.stages.rollout.load_weights(self.stages.actor.publish(step))
        self.stages.queue.clear(batch)
        return metrics
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    info = folder / "my_mode-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "my_mode.py").write_text(MODE)
    (folder / "my_mode_trainer.py").write_text(TRAINER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-mode\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tqppo.mode]\nreinforce = my_mode:REINFORCE\n")
    return folder


def tqppo(folder: Path, package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("tqppo")), *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


SMALL = [
    *("--preset", "quickstart", "--set", "mode=reinforce", "--set", "run.max_steps=2", "--set", "warm_start.steps=2"),
    *("--set", "validation.num_prompts=4", "--set", "data.batch_size=4", "--set", "actor.mini_batch_size=0"),
]


def test_an_installed_mode_is_known_to_the_config_and_its_plan(package: Path, tmp_path: Path) -> None:
    found = tqppo(tmp_path, package, "validate-config", *SMALL)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "advantages.estimate" in found.stdout
    missing = tqppo(tmp_path, tmp_path, "validate-config", *SMALL)
    assert missing.returncode == 3
    assert 'mode cannot be "reinforce"' in missing.stdout + missing.stderr


@pytest.mark.slow
def test_an_installed_mode_trains(package: Path, tmp_path: Path) -> None:
    found = tqppo(tmp_path, package, "train", "--name", "mine", *SMALL)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "finished 2 of 2 steps" in found.stdout
