"""A run on disk, made without training: a tiny model, its config, and a checkpoint with the same weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tqppo.config.compile import compile_config
from tqppo.config.show.export import resolved_toml
from tqppo.run.checkpoint import CheckpointStore
from tqppo.run.folder import RunFolder
from tqppo.space import Digest
from tqppo.tiny.model import write_tiny_model
from tqppo.weights import file as tensorfile
from tqppo.workers.compute.model import add_lora, load_policy
from tqppo.workers.specs import ModelSpec


def make_run(runs: Path, name: str = "mine", *settings: str, shift: float = 0.0, lora_rank: int = 0) -> RunFolder:
    """The checkpoint's weights are the model's plus `shift`; with LoRA, the adapter's are `shift`."""
    run = RunFolder(runs / name)
    own = [f"run.name={name}", "run.max_steps=3", "validation.num_prompts=8", *settings]
    run.path.mkdir(parents=True)
    run.config.write_text(resolved_toml(compile_config("quickstart", [], own, {}).draft))
    write_tiny_model(run.model)

    def save(folder: Path) -> dict[str, Digest]:
        spec = ModelSpec(path=str(run.model), lora_rank=lora_rank)
        model = load_policy(spec, torch.device("cpu"))
        if lora_rank:
            add_lora(model, spec, seed=0)
        learning = {key: value for key, value in model.named_parameters() if value.requires_grad}
        entries = [tensorfile.Entry.of(key, (value + shift).detach()) for key, value in learning.items()]
        (folder / "actor").mkdir()
        tensorfile.write(folder / "actor" / "model.safetensors", entries)
        return {}

    CheckpointStore(run.checkpoints, run_files=run.files_of_resume).write(3, save, {})
    run.metrics.write_text('{"step": 3}\n')
    return run
