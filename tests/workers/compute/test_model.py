from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tqppo.errors import PreflightError
from tqppo.tiny.model import write_tiny_model
from tqppo.workers.compute.loading import compute_dtype
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.microbatch import FlatRows, MicroBatchCut, build
from tqppo.workers.compute.model import PolicyModel, layout_for, load_policy, load_value_model
from tqppo.workers.specs import ModelSpec

CPU = torch.device("cpu")


def test_packed_trimmed_and_padded_forwards_agree(tiny_model: Path, rows: dict[str, Any]) -> None:
    model, flat = load_policy(ModelSpec(str(tiny_model)), CPU), FlatRows.of(rows)
    everyone = MicroBatchCut.apart(torch.arange(len(flat)))
    micros = [build(flat, everyone), build(flat, everyone, layout="packed"), build(flat, everyone, width=200)]
    results = []
    for micro in micros:
        model.zero_grad()
        logprobs, entropy, _ = model(micro, Scoring(1.0, with_entropy=True))
        (logprobs.sum() + entropy.sum()).backward()
        gradient = model.causal_lm.model.layers[0].self_attn.q_proj.weight.grad
        results.append((logprobs.detach(), entropy.detach(), gradient.clone()))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_logprobs_are_the_model_s_own(tiny_model: Path, rows: dict[str, Any]) -> None:
    model, flat = load_policy(ModelSpec(str(tiny_model)), CPU), FlatRows.of(rows)
    found, _, _ = model(build(flat, MicroBatchCut.apart(torch.tensor([3]))), Scoring(0.8))
    tokens = rows["tokens"].unbind()[3]
    logits = AutoModelForCausalLM.from_pretrained(tiny_model)(tokens[None]).logits[0] / 0.8
    expected = logits.log_softmax(-1)[4:16].gather(1, tokens[5:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_head_does_what_each_family_does(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        family,
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **FAMILIES[family],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_policy(ModelSpec(str(tmp_path), attention="eager"), CPU)  # the check runs inside
    assert isinstance(model, PolicyModel)


def test_an_unknown_step_after_the_output_layer_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyModel, "logits", lambda self, hidden: self.causal_lm.lm_head(hidden) + 1.0)
    with pytest.raises(PreflightError, match="after its output layer"):
        load_policy(ModelSpec(str(tiny_model)), CPU)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(PreflightError, match="/no/such/model"):
        load_policy(ModelSpec("/no/such/model"), CPU)


def test_dropout_of_the_config_is_turned_off(tmp_path: Path, rows: dict[str, Any]) -> None:
    write_tiny_model(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.attention_dropout = 0.5
    config.save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), gradient_checkpointing=True)  # which needs training mode
    model, micro = load_policy(spec, CPU), build(FlatRows.of(rows), MicroBatchCut.apart(torch.arange(4)))
    assert torch.equal(model(micro, Scoring(1.0))[0], model(micro, Scoring(1.0))[0])


def test_gradient_checkpointing_changes_nothing_but_memory(tiny_model: Path, rows: dict[str, Any]) -> None:
    gradients = []
    for is_on in (False, True):
        model = load_policy(ModelSpec(str(tiny_model), gradient_checkpointing=is_on), CPU)
        model(build(FlatRows.of(rows), MicroBatchCut.apart(torch.arange(8))), Scoring(1.0))[0].sum().backward()
        gradients.append(model.causal_lm.model.layers[0].mlp.up_proj.weight.grad)
    assert torch.equal(*gradients)


def test_values_start_at_zero(tiny_model: Path, rows: dict[str, Any]) -> None:
    model = load_value_model(ModelSpec(str(tiny_model)), CPU)
    assert model(build(FlatRows.of(rows), MicroBatchCut.apart(torch.arange(8)))).abs().max() == 0


def test_dtype_and_layout_by_device() -> None:
    assert compute_dtype("auto", CPU) == torch.float32
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("float16", CPU) == torch.float16
    assert layout_for("sdpa") == "trimmed"
    assert layout_for("flash_attention_2") == "packed"
