"""Runs with the parts that the presets do without: adapters, a reward model, KL, dynamic sampling, trackers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.runs import Cli
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from tqppo.metrics import files as metrics
from tqppo.tiny.model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def rows(cli: Cli, name: str) -> list[dict[str, float]]:
    return metrics.read(cli.runs / name / "metrics.jsonl")


def reward_model(folder: Path) -> Path:
    """A model that scores a sequence by its last token, for the tiny family's vocabulary."""
    policy = LlamaConfig.from_pretrained(write_tiny_model(folder / "policy"))
    torch.manual_seed(0)
    sizes = {name: getattr(policy, name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = LlamaConfig(**sizes, intermediate_size=64, num_hidden_layers=1, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(folder / "scores")
    return folder / "scores"


def test_lora_with_its_own_reference_and_a_reward_model(cli: Cli, tmp_path: Path) -> None:
    """KL to the model with its adapter off is 0 at first only; the exported model has the adapter in it."""
    cli.train(
        "mine",
        "grpo",
        "model.lora_rank=4",
        "actor.lr=0.01",
        "actor.mini_batch_size=0",  # one update a step: at the first one, the policy is its reference
        'algorithm.kl_loss="k3"',
        "algorithm.kl_loss_coef=0.01",
        f'reward_model.path="{reward_model(tmp_path)}"',
        "reward_model.weight=0.1",
    )
    found = rows(cli, "mine")[1:]
    assert len(found) == 6
    assert found[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert all(row["actor/kl_loss"] > 1e-4 for row in found[1:])
    assert all(row["timing_s/reward"] > 0 and row["timing_s/ref"] > 0 for row in found)
    trained = AutoModelForCausalLM.from_pretrained(cli.runs / "mine" / "export" / "hf")
    before = AutoModelForCausalLM.from_pretrained(cli.runs / "mine" / "model")
    changed = [
        name
        for (name, new), old in zip(trained.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert changed
    assert all("proj" in name for name in changed)


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(cli: Cli) -> None:
    cli.train(
        "mine", "grpo", "algorithm.filter_groups=true", "algorithm.filter_max_rounds=4", "data.task_args.digits=2"
    )
    found = rows(cli, "mine")[1:]
    assert sum(row["training/filter_groups/evicted_samples"] for row in found) > 0
    assert all(row["actor/updates"] == 2 for row in found)


def test_ppo_with_kl_in_the_reward_and_warm_up_of_the_critic(cli: Cli) -> None:
    cli.train(
        "mine", "ppo", 'algorithm.kl_reward="k1"', "algorithm.kl_reward_coef=0.05", "critic.warmup_only_steps=2"
    )  # fmt: skip
    found = rows(cli, "mine")[1:]
    assert [row.get("actor/updates", 0) for row in found] == [0, 0, 2, 2, 2, 2]
    assert all(row["critic/updates"] == 2 for row in found)
    assert found[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert found[-1]["actor/reward_kl_penalty"] != 0
