"""Makes the built-in model of a run: fresh weights from a seed, then a warm start on the run's own task.

`run.build` calls it, for runs and for `doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqppo.tiny.model import TinyShape
from tqppo.tiny.warm_start import Demonstrations, prepare


@dataclass(frozen=True, slots=True)
class TinyModelSpec:
    """The shape of the model, and the supervised steps that it starts with."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    tie_embeddings: bool
    steps: int
    batch_size: int
    lr: float
    seed: int


def make_tiny_model(folder: str, spec: TinyModelSpec, demonstrations: Demonstrations) -> str:
    """Make the model in `folder`, unless an equal one is there already; returns the folder."""
    shape: TinyShape = {
        "family": spec.family,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "tie_embeddings": spec.tie_embeddings,
    }
    made = prepare(
        folder,
        model=shape,
        demonstrations=demonstrations,
        steps=spec.steps,
        batch_size=spec.batch_size,
        lr=spec.lr,
        seed=spec.seed,
    )
    return str(made)
