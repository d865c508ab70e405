"""Runs on the genuine vLLM and SGLang: new weights each step in agreement with the trainer; teachers that score."""

from __future__ import annotations

import pytest
from e2e.runs import Cli

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(("backend", "sync"), [("vllm", "file"), ("sglang", "broadcast")])
def test_the_quickstart_trains_on_a_genuine_engine(cli: Cli, backend: str, sync: str) -> None:
    smaller = ["data.batch_size=8", "actor.mini_batch_size=4", "rollout.group_size=4", "validation.num_prompts=8"]
    settings = [
        f'rollout.backend="{backend}"',
        f'rollout.weight_sync="{sync}"',
        "run.max_steps=4",
        'algorithm.old_logprobs="recompute"',  # for the figures of the difference
        "data.task_args={digits=4,partial_credit=true}",
        *smaller,
    ]
    chosen = [word for setting in settings for word in ("--set", setting)]
    cli.run("train", "--preset", "quickstart", "--name", "mine", *chosen, timeout_s=1400)
    steps = [row for row in metrics.read(cli.runs / "mine" / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert sum(row["actor/updates"] for row in steps) > 0
    for row in steps:  # after every update the engine samples from the trainer's very policy
        assert row["rollout_corr/log_ratio_max"] < 1e-3
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.9999


def test_genuine_teachers_teach_what_embedded_ones_do(cli: Cli) -> None:
    smaller = ["run.max_steps=2", "data.batch_size=16", "actor.mini_batch_size=8", "validation.num_prompts=8"]
    smaller += ["model.hidden_size=128"]  # servers need heads of 32; the preset's have 16
    genuine = ['teachers.sorter.backend="vllm"', 'teachers.reverser.backend="sglang"']
    for name, settings in (("embedded", smaller), ("genuine", [*smaller, *genuine])):
        chosen = [word for setting in settings for word in ("--set", setting)]
        cli.run("train", "--preset", "distill-tiny", "--name", name, *chosen, timeout_s=700)
    ours, theirs = (metrics.read(cli.runs / name / "metrics.jsonl")[1:] for name in ("embedded", "genuine"))
    assert [line["step"] for line in theirs] == [1, 2]
    for name in ("loss", "student_mass", "teacher_mass", "sorter/loss", "reverser/loss"):
        expected = [line[f"distillation/{name}"] for line in ours]
        assert [line[f"distillation/{name}"] for line in theirs] == pytest.approx(expected, rel=1e-3, abs=1e-4)
