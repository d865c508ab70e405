"""Supervised steps on demonstrations: of all weights or of adapters, written as a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tqppo.tiny.warm_start import DONE
from tqppo.workers.specs import ModelSpec
from tqppo.workers.warm_start import WarmStartSpec, warm_start

SHOWN: list[Any] = [([{"role": "user", "content": str(n)}], str(n + 1)) for n in range(8)] * 10


def spec(model: Path, **settings: Any) -> WarmStartSpec:
    lora = {"lora_rank": settings.pop("lora_rank", 0)}
    given = {"steps": 10, "batch_size": 8, "lr": 3e-3, "seed": 0, "micro_batch_tokens": 1000}
    return WarmStartSpec(model=ModelSpec(str(model), **lora), tokenizer=str(model), **{**given, **settings})


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def losses(folder: str) -> list[float]:
    return list(json.loads((Path(folder) / DONE).read_text())["losses"])


@pytest.mark.parametrize("rank", [0, 4])
def test_the_loss_falls_and_the_result_is_a_whole_model(tiny_model: Path, tmp_path: Path, rank: int) -> None:
    made = warm_start(spec(tiny_model, lora_rank=rank, lr=2e-2), SHOWN, str(tmp_path / "model"))
    assert losses(made)[-1] < 0.95 * losses(made)[0]
    before, after = weights(tiny_model), weights(made)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".mlp." in name for name in changed)
    assert any("embed" in name for name in changed) == (rank == 0)  # adapters sit on linear layers only
    assert AutoTokenizer.from_pretrained(made).chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_cut_into_micro_batches_does_not_change_the_steps(tiny_model: Path, tmp_path: Path) -> None:
    whole = weights(warm_start(spec(tiny_model, steps=2), SHOWN, str(tmp_path / "whole")))
    parts = weights(warm_start(spec(tiny_model, steps=2, micro_batch_tokens=10), SHOWN, str(tmp_path / "parts")))
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_same_start_is_made_once_and_another_one_anew(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    warm_start(spec(tiny_model, steps=1), SHOWN, str(folder))
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    warm_start(spec(tiny_model, steps=1), SHOWN, str(folder))
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    warm_start(spec(tiny_model, steps=1), SHOWN[1:], str(folder))
    assert (folder / "model.safetensors").stat().st_mtime_ns != stamp


def test_plain_text_has_no_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    chat = warm_start(spec(tiny_model, steps=1), SHOWN, str(tmp_path / "chat"))
    plain = warm_start(spec(tiny_model, steps=1, is_chat=False), SHOWN, str(tmp_path / "plain"))
    assert losses(chat) != losses(plain)
