"""A model that was not made here gets supervised steps on one's own demonstrations, then reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from e2e.runs import Cli
from transformers import AutoModelForCausalLM

CONFIG = """
mode = "grpo"
[run]
max_steps = 1
[model]
path = "{model}"
lora_rank = {rank}
[warm_start]
steps = 3
batch_size = 8
data = "shown.jsonl"
[data]
train = "task:sort"
size = 20
batch_size = 4
max_prompt_tokens = 16
[rollout]
group_size = 2
max_new_tokens = 6
[actor]
lr = 1e-4
[validation]
num_prompts = 4
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 4])
def test_a_warm_start_on_own_demonstrations_is_the_base_of_the_run(cli: Cli, tiny_model: Path, rank: int) -> None:
    rows = [{"messages": [{"role": "user", "content": "21"}, {"role": "assistant", "content": "12"}]}] * 3
    (cli.folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cli.folder / "mine.toml").write_text(CONFIG.format(model=tiny_model, rank=rank))
    said = cli.run("train", "--config", "mine.toml", "--name", "mine")
    assert "warm start 3 steps on 3 demonstrations" in said
    folder = cli.runs / "mine"
    models = [tiny_model, folder / "model", folder / "export" / "hf"]
    loaded = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).state_dict() for each in models]
    assert all(state.keys() == loaded[0].keys() for state in loaded)
    assert not all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])
    stamp = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    cli.run("resume", "mine", "--max-steps", "2")
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == stamp
