"""What only GPUs can show of whole runs. `make test-gpu` runs this and the other tests that need a GPU.

The same settings train on GPUs that do not exist in `test_fake_gpus`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from e2e.runs import Cli

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def shared(gpus: int) -> Sequence[str]:
    """Actor, reference and engines take turns on this many GPUs; one of them is enough for each rank."""
    ranks = [f"{key}={gpus}" for key in ("cluster.gpus_per_node", "actor.ranks", "reference.ranks", "rollout.replicas")]
    return [*ranks, "algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.001", "checkpoint.background=true"]


def figures(cli: Cli, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (cli.runs / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_takes_turns_on_gpus_and_its_engines_get_every_update(cli: Cli, dtype: str) -> None:
    gpus = min(2, torch.cuda.device_count())
    cli.train("mine", "grpo", *shared(gpus), f"model.dtype={dtype}", "run.max_steps=3")
    rows = figures(cli, "mine")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in rows)
    most = 1e-3 if dtype == "float32" else 0.5
    assert max(row.get("rollout/sync_logprob_diff_max", 0.0) for row in rows) < most


def test_a_run_that_was_saved_on_gpus_goes_on_with_one_of_them(cli: Cli) -> None:
    cli.train("mine", "grpo", *shared(min(2, torch.cuda.device_count())), "run.max_steps=2")
    fewer = [word for setting in shared(1)[:4] for word in ("--set", setting)]
    cli.run("resume", "--checkpoint", "mine", "--max-steps", "3", *fewer)
    assert figures(cli, "mine")[-1]["step"] == 3
