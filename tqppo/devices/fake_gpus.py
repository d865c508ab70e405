"""Fake GPUs, with which a machine without any runs the whole assembly of a GPU run: placement, turns and memory.

`TQPPO_FAKE_GPUS=8` gives a private Ray eight GPUs that do not exist; models compute on the CPU. Each fake GPU has a
ledger of what every role holds on it, and the memory that `TQPPO_FAKE_GPU_MEMORY_GB` says, or else the config.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tqppo.errors import UsageError
from tqppo.units import GIB

COUNT, MEMORY = "TQPPO_FAKE_GPUS", "TQPPO_FAKE_GPU_MEMORY_GB"
DEFAULT_GB = 80.0


@dataclass(frozen=True, slots=True)
class FakeGpus:
    count: int
    memory_bytes: int  # of each


def fake_gpus(memory_gb: float = 0.0) -> FakeGpus | None:
    """The fake GPUs that the environment asks for; `memory_gb` is the config's size of a GPU, 0 if it says none."""
    if not os.environ.get(COUNT):
        return None
    try:
        count, memory_gb = int(os.environ[COUNT]), float(os.environ.get(MEMORY) or memory_gb or DEFAULT_GB)
    except ValueError as error:
        raise UsageError(f"{COUNT} is a number of GPUs, {MEMORY} a number of GiB: {error}") from None
    return FakeGpus(count, int(memory_gb * GIB)) if count > 0 else None
