"""A run that was killed and resumed ends in the same bytes as one that never was."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from e2e.runs import Cli, family, living, wait_until

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def lines(cli: Cli, name: str) -> int:
    path = cli.runs / name / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait until nothing that it started is left."""
    started = family(process) if process.poll() is None else []
    process.kill()
    process.wait()
    wait_until(lambda: not living(started), lambda: f"these to end: {living(started)}", timeout_s=60)


def kill_during(moment: str, process: subprocess.Popen[str], cli: Cli, name: str) -> None:
    """At a random point of a step, or in the middle of a save."""
    before = lines(cli, name)
    if moment in ("save", "background save"):
        folder = cli.runs / name / "checkpoints"

        def saving() -> bool:
            is_second = (folder / "latest").exists()  # a run that is killed in its first save has nothing to go on from
            return (is_second and any(folder.glob(".partial-*/actor"))) or process.poll() is not None

        wait_until(saving, "a save", interval_s=0.0005)
    else:
        saved = cli.runs / name / "checkpoints" / "latest"
        stepped = lambda: (lines(cli, name) > before + 1 and saved.exists()) or process.poll() is not None  # noqa: E731
        wait_until(stepped, "a step and a checkpoint")
        time.sleep(random.uniform(0.0, 0.3))
    kill(process)


SLOW_REWARD = """
import time
def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 4
"""

# What a step mostly consists of, so that a random moment falls into it.
EMPHASIS = {
    "generation": ['reward.function="slow.py:slow"'],
    "update": ["actor.epochs=40"],
    "save": [],
    "background save": ["checkpoint.background=true"],
}


@pytest.mark.parametrize(
    ("mode", "storage", "moments"),
    [
        ("grpo", "simple", ["generation"]),
        pytest.param("grpo", "simple", ["update", "update"], marks=pytest.mark.long),
        pytest.param("grpo", "ray", ["save"], marks=pytest.mark.long),
        pytest.param("ppo", "simple", ["save", "update"], marks=pytest.mark.long),
        pytest.param("ppo", "simple", ["background save", "background save"], marks=pytest.mark.long),
        pytest.param("ppo", "ray", ["generation"], marks=pytest.mark.long),
    ],
)
def test_a_killed_and_resumed_run_equals_one_that_never_was(
    cli: Cli, mode: str, storage: str, moments: list[str]
) -> None:
    (cli.folder / "slow.py").write_text(SLOW_REWARD)
    settings = [f'storage.backend="{storage}"', *EMPHASIS[moments[-1]]]
    cli.train("whole", mode, *settings)
    process = cli.start(*cli.train_arguments("killed", mode, *settings))
    for moment in moments:
        kill_during(moment, process, cli, "killed")
        process = cli.start("resume", "--checkpoint", "killed")
    output, _ = process.communicate(timeout=420)
    assert process.returncode == 0, output
    assert metrics.comparable(cli.runs / "killed" / "metrics.jsonl") == metrics.comparable(
        cli.runs / "whole" / "metrics.jsonl"
    )
    assert cli.weights("killed") == cli.weights("whole")
    assert not list(Path("/dev/shm").glob(f"tqppo*{process.pid}*"))


@pytest.mark.parametrize(
    ("mode", "storage", "ahead", "moments"),
    [
        ("grpo", "simple", 1, ["generation"]),
        pytest.param("ppo", "simple", 2, ["update", "generation"], marks=pytest.mark.long),
        pytest.param("grpo", "ray", 1, ["save", "update"], marks=pytest.mark.long),
        pytest.param("distill", "simple", 1, ["generation", "save"], marks=pytest.mark.long),
        pytest.param("grpo", "ray", 2, ["generation"], marks=pytest.mark.long),
    ],
)
def test_a_killed_run_that_samples_ahead_equals_one_in_one_process_that_never_was(
    cli: Cli, mode: str, storage: str, ahead: int, moments: list[str]
) -> None:
    (cli.folder / "slow.py").write_text(SLOW_REWARD)
    settings = [f"rollout.ahead={ahead}", "validation.interval=4", *EMPHASIS[moments[-1]]]
    cli.train("whole", mode, *settings, "cluster.in_process=true")
    process = cli.start(*cli.train_arguments("killed", mode, *settings, f'storage.backend="{storage}"'))
    for moment in moments:
        kill_during(moment, process, cli, "killed")
        process = cli.start("resume", "--checkpoint", "killed")
    output, _ = process.communicate(timeout=420)
    assert process.returncode == 0, output
    rows = metrics.read(cli.runs / "killed" / "metrics.jsonl")
    behind = [row.get("training/off_policy/versions_behind/mean") for row in rows]
    assert behind == [None, *(min(step, ahead) for step in range(6))]
    assert metrics.comparable(cli.runs / "killed" / "metrics.jsonl") == metrics.comparable(
        cli.runs / "whole" / "metrics.jsonl"
    )
    assert cli.weights("killed") == cli.weights("whole")


@pytest.mark.long
def test_one_seed_gives_the_same_bytes_and_another_does_not(cli: Cli) -> None:
    cli.train("first", "grpo")
    cli.train("again", "grpo")
    cli.train("other", "grpo", "run.seed=1")
    assert cli.weights("first") == cli.weights("again")
    assert cli.weights("first") != cli.weights("other")
    compare = [metrics.comparable(cli.runs / name / "metrics.jsonl") for name in ("first", "again", "other")]
    assert compare[0] == compare[1] != compare[2]


@pytest.mark.long
def test_a_longer_run_goes_on_and_a_complete_one_says_so(cli: Cli) -> None:
    cli.train("mine", "grpo", "run.max_steps=3", 'actor.schedule="constant"')
    said = cli.run("resume", "--checkpoint", "mine")
    assert "is complete: step 3 of 3" in said
    assert "nothing was trained" in said
    cli.run("resume", "--checkpoint", "mine", "--max-steps", "6")
    cli.train("whole", "grpo", 'actor.schedule="constant"')
    assert cli.weights("mine") == cli.weights("whole")


@pytest.mark.long
def test_settings_that_would_change_the_result_are_refused_one_by_one(cli: Cli) -> None:
    cli.train("mine", "grpo", "run.max_steps=2")
    arguments = ["resume", "--checkpoint", "mine", "--max-steps", "4"]
    said = cli.run(*arguments, "--set", "actor.lr=0.5", "--set", "rollout.group_size=8", code=5)
    assert "actor.lr: 0.001 → 0.5" in said
    assert "rollout.group_size: 4 → 8" in said
    checkpoint = sorted((cli.runs / "mine" / "checkpoints").glob("step_*"))[-1]
    (checkpoint / "actor" / "model.safetensors").write_bytes(b"spoiled")
    said = cli.run("resume", "--checkpoint", str(checkpoint), "--max-steps", "4", code=5)
    assert f"{checkpoint / 'actor' / 'model.safetensors'} is corrupt" in said
    cli.run("resume", "--checkpoint", "latest", "--max-steps", "4")  # falls back to step 1
    assert [row["step"] for row in metrics.read(cli.runs / "mine" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
