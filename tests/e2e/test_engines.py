"""The quickstart on the genuine vLLM and SGLang: new weights each step, engine and trainer in agreement."""

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
