"""Room for what a run writes, asked before any process starts: published weights, checkpoints, and host memory.

A run of hours must not end at its first checkpoint, and a full /dev/shm would end it without a message.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tqppo.config import facts
from tqppo.config.plan.memory import BYTES, size
from tqppo.config.sections import Config
from tqppo.errors import PreflightError
from tqppo.space import SHARED_MEMORY
from tqppo.weights import location

STATE_BYTES = 12  # per trained parameter: float32 weights and AdamW's two moments


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes, asked when they are needed; tests have their own."""

    disk: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    memory: Callable[[], int] = lambda: int(psutil.virtual_memory().available)


def model_bytes(config: Config, model: str) -> int:
    """The size of one published version: by the model's shape, or else by its files; 0 if neither is known."""
    shape = facts.model_shape(config)
    if shape is not None:
        return shape.parameters * BYTES[facts.compute_dtype(config)]
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def checkpoint_bytes(config: Config) -> int:
    """The size of one checkpoint; 0 if a model's shape is not known, or the adapter of LoRA is all there is to save."""
    shape = facts.model_shape(config)
    saves = config.checkpoint.interval or config.checkpoint.save_on_exit
    if shape is None or not saves or config.model.lora_rank:
        return 0
    return STATE_BYTES * shape.parameters * len(facts.learning_roles(config))


def check_room(config: Config, model: str, run_folder: Path, room: Room = Room()) -> None:  # noqa: B008 - frozen
    """Raise `PreflightError` with the figures if weights or a checkpoint cannot be written."""
    published = model_bytes(config, model)
    place = location.parent(published)
    needed = location.VERSIONS * published
    problems = []
    if place == SHARED_MEMORY and needed > room.memory():
        problems.append(
            f"published weights need {size(needed)} of memory ({SHARED_MEMORY} is memory), and {size(room.memory())} "
            "are free\n  train a smaller model, or use a machine with more memory"
        )
    saved = checkpoint_bytes(config)
    if config.checkpoint.on_full_disk == "stop" and saved > room.disk(run_folder):
        problems.append(
            f"a checkpoint needs {size(saved)}, and {run_folder} has {size(room.disk(run_folder))} free\n"
            '  free some, set run.dir to a larger disk, or checkpoint.on_full_disk = "continue"'
        )
    if problems:
        raise PreflightError("\n".join(problems))
