"""Writes the actor of a checkpoint as a Hugging Face folder, in this process: `tqppo export` calls it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tqppo.errors import CheckpointError
from tqppo.weights import publish as weights
from tqppo.weights.parts import Parts
from tqppo.workers.compute.loading import DTYPES
from tqppo.workers.compute.model import PolicyModel, add_lora, load_policy
from tqppo.workers.specs import ModelSpec


def export_checkpoint(spec: ModelSpec, actor: Path, folder: Path, *, dtype: str = "float32", seed: int = 0) -> None:
    """Fill the model of `spec` with the weights in `actor`, and write it with its tokenizer; adapters are merged."""
    model = _filled(spec, actor, seed)
    folder.mkdir(parents=True, exist_ok=True)
    weights.save_description(model.causal_lm, spec.path, folder, DTYPES[dtype])
    weights.export(folder, weights.entries(model.causal_lm, DTYPES[dtype]))
    add_tokenizer(spec, folder)


def add_tokenizer(spec: ModelSpec, folder: Path) -> None:
    """Save the tokenizer of a hub name; that of a folder has been copied as it is."""
    if not any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        tokenizer.save_pretrained(folder)


def export_adapter(spec: ModelSpec, actor: Path, folder: Path, *, seed: int = 0) -> None:
    """Write the LoRA adapter alone, as `peft` loads it with `PeftModel.from_pretrained`."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    if not spec.lora_rank:
        raise CheckpointError("this run has no adapter: model.lora_rank is 0. Export the whole model instead")
    model = _filled(spec, actor, seed)
    targets = spec.lora_targets[0] if spec.lora_targets == ("all-linear",) else list(spec.lora_targets)
    settings = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=int(spec.lora_alpha),
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.path,
    )
    folder.mkdir(parents=True, exist_ok=True)
    adapter = {name: tensor for name, tensor in model.causal_lm.state_dict().items() if ".lora_" in name}
    named = {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in adapter.items()}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "adapter_model.safetensors")
    settings.save_pretrained(str(folder))


def _filled(spec: ModelSpec, actor: Path, seed: int) -> PolicyModel:
    saved = Parts.open(actor, "model")
    model = load_policy(replace(spec, gradient_checkpointing=False), torch.device("cpu"))
    if spec.lora_rank:
        add_lora(model, replace(spec, gradient_checkpointing=False), seed=seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in saved.names:
            if name not in parameters:
                raise CheckpointError(f"{actor}: the model has no parameter {name!r}; is it another model?")
            parameters[name].copy_(saved.like(name, parameters[name]))
    return model
