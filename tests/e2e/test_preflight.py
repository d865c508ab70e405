"""What cannot work is said before anything waits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from e2e.runs import Cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_plan_larger_than_the_cluster_ends_with_the_arithmetic(cli: Cli) -> None:
    said = cli.train("mine", "grpo", "cluster.cpus_per_worker=1000", code=4)
    assert "the plan needs 1000 CPUs, the cluster has" in said
    assert "actor 1 × 500 + rollout 1 × 500 = 1000" in said


def test_a_model_that_is_not_there_is_named(cli: Cli) -> None:
    said = cli.run("train", "--preset", "quickstart", "--set", 'model.path="/nowhere/model"', code=4)
    assert "/nowhere/model" in said
    assert "Traceback" not in said


def in_small_shared_memory() -> list[str]:
    """A prefix that gives a command its own /dev/shm of 8 MB, as a container without --shm-size has a small one."""
    return ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"', "sh"]


may_mount = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*in_small_shared_memory(), "true"], check=False).returncode != 0,
    reason="needs a mount namespace",
)
LARGE = ("model.hidden_size=512", "model.num_layers=2", "model.num_heads=8", "warm_start.steps=0", "run.max_steps=1")


@pytest.mark.long
@may_mount
def test_small_shared_memory_sends_published_weights_elsewhere(cli: Cli) -> None:
    cli.prefix = in_small_shared_memory()
    cli.train("mine", "grpo", *LARGE)


@may_mount
def test_no_room_for_weights_anywhere_ends_with_the_figures(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    cli.prefix = in_small_shared_memory()
    said = cli.train("mine", "grpo", *LARGE, code=4)
    assert "published weights need" in said
    assert "--shm-size" in said
