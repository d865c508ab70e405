"""Whole runs on fake GPUs: placement, turns, loading, publishing and a ledger of every device's memory."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from e2e.runs import Cli

from tqppo.devices.fake_gpus import COUNT, MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = (
    *("cluster.gpus_per_node=2", "actor.ranks=2", "rollout.replicas=2", "run.max_steps=2"),
    *("algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.001", "reference.ranks=2"),
)
TINY = (
    *(
        "model.path=tiny",
        "data.train=task:sort",
        "data.task_args={partial_credit=true}",
        "data.batch_size=16",
        "data.size=64",
    ),
    *("rollout.backend=embedded", "rollout.tensor_parallel=1", "rollout.replicas=8", "rollout.max_new_tokens=6"),
    *("reward.function=", "validation.data=", "validation.num_prompts=8", "validation.interval=0"),
    *("actor.mini_batch_size=8", "warm_start.steps=4", "data.max_prompt_tokens=16", "run.max_steps=2"),
)


def settings(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def steps(cli: Cli, name: str) -> list[int]:
    lines = (cli.runs / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.long
def test_a_run_on_two_fake_gpus_is_the_run_on_cpus(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = [each for each in TWO if not each.startswith("cluster.")]
    cli.train("cpus", "grpo", *cpus, "model.dtype=float32", "cluster.cpus_per_worker=0.1")
    monkeypatch.setenv(COUNT, "2")
    cli.train("gpus", "grpo", *TWO, "model.dtype=float32")
    assert cli.weights("gpus") == cli.weights("cpus")


@pytest.mark.long
def test_a_fake_gpu_that_is_too_small_ends_the_run_with_the_sum(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "2")
    monkeypatch.setenv(MEMORY, "0.0001")
    said = cli.train("mine", "grpo", *TWO, code=1)
    assert "GPU 0 of node 0 has no room" in said
    assert " of 105 KiB" in said
    assert "micro_batch_tokens" in said
    assert "Traceback" not in said


def trained(cli: Cli, name: str) -> bool:
    """Whether some update has moved the weights, and so made the optimizer's state."""
    lines = (cli.runs / name / "metrics.jsonl").read_text().splitlines()
    return any(json.loads(line).get("actor/grad_norm", 0.0) > 0 for line in lines)


def parts(cli: Cli, name: str, step: int) -> int:
    """How many ranks saved the actor."""
    return len(list((cli.runs / name / "checkpoints" / f"step_{step:06d}" / "actor").glob("model*.safetensors")))


@pytest.mark.long
def test_a_run_on_two_fake_gpus_goes_on_with_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "2")
    cli.train("mine", "grpo", *TWO)
    assert parts(cli, "mine", 2) == 2
    monkeypatch.setenv(COUNT, "1")
    fewer = settings(["cluster.gpus_per_node=1", "actor.ranks=1", "rollout.replicas=1", "reference.ranks=1"])
    said = cli.run("resume", "--checkpoint", "mine", "--max-steps", "3", *fewer)
    assert "actor.ranks: 2 → 1" in " ".join(said.split())
    assert steps(cli, "mine") == [0, 1, 2, 3]
    assert parts(cli, "mine", 3) == 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", ["grpo-7b", "ppo-7b"])
def test_the_preset_for_eight_gpus_trains_to_its_end_on_fake_ones(
    cli: Cli, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COUNT, "8")
    critic = ["critic.mini_batch_size=8", "critic.warmup_only_steps=1"] if preset == "ppo-7b" else []
    cli.run("train", "--preset", preset, "--name", "mine", *settings([*TINY, *critic]), timeout_s=850)
    assert steps(cli, "mine")[-1] == 2
    assert trained(cli, "mine")
    assert parts(cli, "mine", 2) == 8
    monkeypatch.setenv(COUNT, "4")
    roles = ["actor.ranks", "reference.ranks", "rollout.replicas", *(["critic.ranks"] if preset == "ppo-7b" else [])]
    fewer = settings([f"{key}=4" for key in (*roles, "cluster.gpus_per_node")])
    said = cli.run("resume", "--checkpoint", "mine", "--max-steps", "3", *fewer, timeout_s=850)
    assert "up to rounding, and no longer to the bit" in " ".join(said.split())
    assert steps(cli, "mine")[-1] == 3
    assert parts(cli, "mine", 3) == 4


def teacher(name: str, task: str, replicas: int) -> list[str]:
    """The model itself, which reads the answer in its prompt."""
    given = {"path": "student", "backend": "embedded", "tensor_parallel": 1, "replicas": replicas}
    given |= {"match": f'["{task}"]', "prompt": '"{prompt} {answer}"'}
    return [f"teachers.{name}.{key}={value}" for key, value in given.items()]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_student_and_its_pool_of_teachers_train_on_fake_gpus(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    teachers = [*teacher("math", "sort", 2), *teacher("code", "reverse", 1), "distillation.gpus_per_node=3"]
    tasks = ['data.train=["task:sort","task:reverse"]', "distillation.top_k=8", "cluster.address="]
    monkeypatch.setenv(COUNT, "11")
    chosen = settings([*TINY, *tasks, *teachers])
    cli.run("train", "--preset", "distill-7b", "--name", "mine", *chosen, timeout_s=850)
    assert steps(cli, "mine")[-1] == 2
    assert trained(cli, "mine")
    assert parts(cli, "mine", 2) == 8
    monkeypatch.setenv(COUNT, "7")
    fewer = settings([f"{key}=4" for key in ("actor.ranks", "rollout.replicas", "cluster.gpus_per_node")])
    cli.run("resume", "--checkpoint", "mine", "--max-steps", "3", *fewer, timeout_s=850)
    assert steps(cli, "mine")[-1] == 3
    assert parts(cli, "mine", 3) == 4
