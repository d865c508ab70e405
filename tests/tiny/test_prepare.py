from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from tqppo.tiny.prepare import TinyModelSpec, make_tiny_model

SPEC = TinyModelSpec("qwen3", 32, 1, 2, True, steps=1, batch_size=4, lr=1e-3, seed=0)


def test_the_model_has_the_shape_asked_for_and_is_made_once(tmp_path: Path) -> None:
    data = [([{"role": "user", "content": str(i)}], str(i)) for i in range(10)]
    folder = Path(make_tiny_model(str(tmp_path / "model"), SPEC, data))
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("qwen3", 32, 1)
    first = (folder / "model.safetensors").stat().st_ino
    make_tiny_model(str(folder), SPEC, data)
    assert (folder / "model.safetensors").stat().st_ino == first
    make_tiny_model(str(folder), replace(SPEC, seed=1), data)
    assert (folder / "model.safetensors").stat().st_ino != first
