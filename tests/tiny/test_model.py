from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tqppo.errors import OutOfSpace
from tqppo.tiny.model import VOCABULARY, save, write_tiny_model
from tqppo.tiny.tokenizer import byte_tokenizer


@pytest.mark.parametrize("text", ["3142", "naïve – 日本", "\n\t "])
def test_each_byte_is_one_token_and_comes_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_chat_template_ends_with_the_assistants_turn() -> None:
    messages = [{"role": "user", "content": "21"}]
    text = byte_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>21<|assistant|>"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_folder_loads_like_any_other_model(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family=family, hidden_size=32, num_layers=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family
    assert model.config.vocab_size == VOCABULARY >= len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other


def test_a_model_that_does_not_fit_on_the_disk_is_refused_with_the_figures(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "small", hidden_size=32, num_layers=1))
    model.register_parameter("huge", torch.nn.Parameter(torch.empty(1 << 50, device="meta")))
    with pytest.raises(OutOfSpace, match=r"has no room for \d{16} bytes"):
        save(model, tmp_path / "huge")
    assert not list((tmp_path / "huge").iterdir())
