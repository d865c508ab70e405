"""Checkpoints as Hugging Face folders: adapters merged, or alone as peft loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doctor.saved_runs import make_run
from transformers import AutoModelForCausalLM

from tqppo.errors import CheckpointError
from tqppo.workers.export import export_adapter, export_checkpoint
from tqppo.workers.specs import ModelSpec


def test_a_merged_adapter_and_one_that_peft_loads_compute_the_same(tmp_path: Path) -> None:
    from peft import PeftModel

    run = make_run(tmp_path, shift=0.05, lora_rank=2)
    spec = ModelSpec(path=str(run.model), lora_rank=2)
    actor = run.checkpoints / "step_000003" / "actor"
    export_checkpoint(spec, actor, tmp_path / "merged")
    export_adapter(spec, actor, tmp_path / "adapter")
    tokens = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(run.model)
    plain = base(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
    assert torch.allclose(merged, adapted, atol=1e-4)
    assert not torch.allclose(merged, plain, atol=1e-3)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, lora_rank=2)
    actor = run.checkpoints / "step_000003" / "actor"
    with pytest.raises(CheckpointError, match="the model has no parameter"):
        export_checkpoint(ModelSpec(path=str(run.model)), actor, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"model\.lora_rank is 0"):
        export_adapter(ModelSpec(path=str(run.model)), actor, tmp_path / "x")
    with pytest.raises(CheckpointError, match="has no weights"):
        export_checkpoint(ModelSpec(path=str(run.model)), tmp_path, tmp_path / "x")
