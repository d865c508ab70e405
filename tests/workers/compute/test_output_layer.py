"""A teacher's output layer, read from its folder, gives the logits that the whole model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tqppo.errors import PreflightError
from tqppo.workers.compute.output_layer import load_output_layer

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {"final_logit_softcapping": 5.0, "num_key_value_heads": 2, "head_dim": 16},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "phi": {},  # with a bias
    "gpt2": {},
}


def teacher(folder: Path, family: str, shard: str = "1GB", **settings: Any) -> PreTrainedModel:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **sizes, **ids, **FAMILIES[family], **settings)
    model = AutoModelForCausalLM.from_config(config)
    model.get_output_embeddings().weight.data.mul_(20)
    if model.get_output_embeddings().bias is not None:
        model.get_output_embeddings().bias.data.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


@torch.no_grad()
def states_and_logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(7)[None]
    return model.base_model(tokens).last_hidden_state[0], model(tokens).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_teacher_s_own(family: str, tmp_path: Path) -> None:
    hidden, expected = states_and_logits(teacher(tmp_path, family))
    layer = load_output_layer(str(tmp_path), torch.float32, CPU)
    torch.testing.assert_close(layer.logits(hidden), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_it_is_found_in_a_folder_of_several_files(family: str, tmp_path: Path) -> None:
    hidden, expected = states_and_logits(teacher(tmp_path, family, shard="8KB"))
    assert not (tmp_path / "model.safetensors").exists()
    layer = load_output_layer(str(tmp_path), torch.float32, CPU)
    torch.testing.assert_close(layer.logits(hidden), expected, atol=1e-6, rtol=1e-6)


def test_in_bfloat16_it_takes_half_the_memory_and_gives_float32(tmp_path: Path) -> None:
    hidden, expected = states_and_logits(teacher(tmp_path, "llama"))
    layer = load_output_layer(str(tmp_path), torch.bfloat16, CPU)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.logits(hidden).dtype == torch.float32
    torch.testing.assert_close(layer.logits(hidden), expected, atol=0.1, rtol=0.05)


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    model = teacher(tmp_path, "llama")
    model.base_model.save_pretrained(tmp_path)
    with pytest.raises(PreflightError, match=r"no output layer among its weights: none of lm_head\.weight"):
        load_output_layer(str(tmp_path), torch.float32, CPU)
    with pytest.raises(PreflightError, match="cannot be loaded"):
        load_output_layer(str(tmp_path / "nowhere"), torch.float32, CPU)
