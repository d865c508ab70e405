"""Models that ranks share: each rank reads its own rows, and has the bits that `from_pretrained` has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tqppo.workers.compute.loading import TensorFiles

RANK = Path(__file__).with_name("loading_rank.py")


def load_on_ranks(size: int, folder: Path, model: Path, *cases: str) -> list[dict[str, float]]:
    """What each rank found: see `loading_rank.py`."""
    command = [sys.executable, str(RANK), str(model), str(folder), str(size)]
    ranks = [subprocess.Popen([*command, str(rank), *cases], stderr=subprocess.PIPE, text=True) for rank in range(size)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=280)
        assert rank.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4).bfloat16()
    save_file({"model.a.weight": tensor, "model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    files = TensorFiles.find(str(tmp_path))
    assert files is not None
    assert torch.equal(files.rows("model.a.weight", 2, 3), tensor[2:5])
    assert files.rows("model.a.weight", 6, 0).shape == (0, 4)
    assert files.name_of("a.weight") == "model.a.weight"
    assert files.name_of("whole.model.norm.weight") == "model.norm.weight"
    assert files.name_of("b.weight") == ""
    (tmp_path / "empty").mkdir()
    assert TensorFiles.find(str(tmp_path / "empty")) is None


@pytest.mark.parametrize("content", [b"\x02" + bytes(7) + b"{", b"\x02" + bytes(7) + b"[]", b"\xff" * 16])
def test_damaged_files_are_left_to_transformers_which_explains_them(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert TensorFiles.find(str(tmp_path)) is None


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_have_the_bits_of_the_files(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=263, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    load_on_ranks(2, tmp_path, tmp_path / "model", "actor", "critic", "frozen", "lora")


@pytest.mark.slow
def test_four_ranks_hold_little_more_than_their_shard(tmp_path: Path) -> None:
    """A model of 200 MB in float32."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_bytes = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    del model
    for found in load_on_ranks(4, tmp_path, tmp_path / "model", "memory"):
        assert found["peak_bytes"] < 1.5 * num_bytes / 4 + largest, (found, num_bytes, largest)
