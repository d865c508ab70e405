from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tqppo.errors import PreflightError
from tqppo.workers.actor import Actor
from tqppo.workers.compute import model as models
from tqppo.workers.specs import RoleSpec


@pytest.fixture
def make_lora(make_actor: Callable[..., Actor], spec: RoleSpec) -> Callable[..., Actor]:
    return lambda **changes: make_actor(model=replace(spec.model, lora_rank=4), **changes)


def test_only_adapters_learn_and_the_reference_is_the_model_without_them(
    make_lora: Callable[..., Actor], make_actor: Callable[..., Actor], rows: dict[str, Any]
) -> None:
    actor, untouched = make_lora(), make_actor()
    assert all("lora_" in name for name in actor.optimizer.parameters)
    actor.update(rows, step=1)
    actor.update(rows, step=2)
    base = untouched.old_logprobs(rows)["old_logprobs"].values()
    torch.testing.assert_close(actor.reference_logprobs(rows)["ref_logprobs"].values(), base)
    assert (actor.old_logprobs(rows)["old_logprobs"].values() - base).abs().max() > 1e-4


def test_published_weights_have_the_adapter_merged(
    make_lora: Callable[..., Actor], rows: dict[str, Any], tmp_path: Path
) -> None:
    actor = make_lora(publish_dir=str(tmp_path / "weights"))
    for step in (1, 2):
        actor.update(rows, step=step)
    before = {name: p.clone() for name, p in actor.model.named_parameters()}
    source = actor.publish(1)
    assert all(torch.equal(before[name], p) for name, p in actor.model.named_parameters())
    merged = AutoModelForCausalLM.from_pretrained(source.folder)
    tokens = rows["tokens"].unbind()[3]
    expected = actor.model.causal_lm(tokens[None]).logits
    torch.testing.assert_close(merged(tokens[None]).logits, expected, atol=1e-5, rtol=1e-5)
    actor.close()


def test_a_saved_adapter_continues_to_the_bit(
    make_lora: Callable[..., Actor], rows: dict[str, Any], tmp_path: Path
) -> None:
    original, resumed = make_lora(), make_lora(seed=7)
    original.update(rows, step=1)
    original.save(str(tmp_path))
    resumed.load(str(tmp_path))
    assert original.update(rows, step=2) == resumed.update(rows, step=2)


def test_adapters_learn_under_gradient_checkpointing(
    make_actor: Callable[..., Actor], spec: RoleSpec, rows: dict[str, Any]
) -> None:
    plain, checkpointed = (
        make_actor(model=replace(spec.model, lora_rank=4, gradient_checkpointing=is_on)) for is_on in (False, True)
    )
    metrics = [actor.update(rows, step=1) for actor in (plain, checkpointed)]
    assert metrics[0]["actor/grad_norm"] == pytest.approx(metrics[1]["actor/grad_norm"])


def test_without_peft_the_command_to_install_it_is_given(
    make_lora: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=r"pip install 'tqppo\[lora\]'"):
        make_lora()
