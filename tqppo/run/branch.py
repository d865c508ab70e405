"""`resume --fork NAME --set …`: a new run with other settings that starts from a checkpoint's weights."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tqppo.config import facts
from tqppo.config.compilation import Compilation
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.errors import ConfigError, UsageError
from tqppo.run.checkpoint import Checkpoint
from tqppo.run.folder import RunFolder

# Settings that describe how a tiny model is made: the new run starts from weights that are there.
OF_TINY_MODELS = (
    "warm_start",
    "model.family",
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.tie_embeddings",
)


def branch(folder: RunFolder, forked: RunFolder, checkpoint: Checkpoint, changes: Sequence[str]) -> Compilation:
    """Write the checkpoint's weights as the model of the new run, and compile its config."""
    if any(each.partition("=")[0].strip() == "model.path" for each in changes):
        raise UsageError("a fork starts from the checkpoint's weights: model.path cannot be changed; use tqppo train")
    from tqppo.run import configure
    from tqppo.workers.export import export_checkpoint

    before = _compiled(folder, []).draft
    model = str(folder.model) if facts.makes_model(before) else before.model.path
    compilation = _compiled(folder, [*changes, f"model.path={json.dumps(str(forked.model.resolve()))}"])
    spec = configure.model_spec(before, model, lora=True)
    export_checkpoint(spec, checkpoint.folder / "actor", forked.model, seed=before.run.seed)
    return compilation


def what_changes(folder: RunFolder, step: int, changed: Sequence[str]) -> str:
    """What the user is told: the fork is a new run, not a continuation."""
    listed = "\n".join(changed)
    return (
        f"a new run from the weights of step {step} of {folder.name}. It does not continue that run exactly: the "
        "optimizer, the learning-rate schedule, the order of the data, random numbers and a critic start over.\n"
        f"Changed settings:\n{listed}"
    )


def _compiled(folder: RunFolder, changes: Sequence[str]) -> Compilation:
    unset = OF_TINY_MODELS if changes else ()
    compilation = compile_config(None, [folder.config], list(changes), environ={}, unset=unset)
    if compilation.config is None:
        raise ConfigError(render_text(compilation.diagnostics))
    return compilation
