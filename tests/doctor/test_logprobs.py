"""The trainer's side of the comparison, and the whole of it on the built-in model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tqppo.config.compile import compile_config
from tqppo.doctor.logprobs import measure, trainer_logprobs
from tqppo.protocols import Completion


def test_the_trainer_scores_sampled_tokens_at_the_sampling_temperature(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4]])).logits[0]
    expected = [(logits[i] / 0.5).log_softmax(-1)[token].item() for i, token in ((1, 3), (2, 4))]
    found = trainer_logprobs(str(tiny_model), [[1, 2]], [Completion([3, 4], [0.0, 0.0], "stop", 0)], temperature=0.5)
    assert found[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_the_embedded_engine_agrees_with_the_trainer() -> None:
    settings = ["warm_start.steps=0", "data.size=4", "rollout.max_new_tokens=4"]
    compilation = compile_config("quickstart", [], settings, {})
    assert compilation.config is not None
    said: list[str] = []
    found = measure(compilation.config, num_prompts=2, announce=said.append)
    assert found.num_sequences == 2
    assert found.max_abs < 1e-4
    assert said[0] == "making the model"
