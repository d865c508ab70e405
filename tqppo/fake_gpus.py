"""Fake GPUs, with which a machine without any runs the whole assembly of a GPU run: placement, turns and memory.

`TQPPO_FAKE_GPUS=8` gives a private Ray eight GPUs that do not exist; models compute on the CPU. Each fake GPU has
`TQPPO_FAKE_GPU_MEMORY_GB` (80) of memory, and a ledger of what every role holds on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tqppo.errors import UsageError

COUNT, MEMORY = "TQPPO_FAKE_GPUS", "TQPPO_FAKE_GPU_MEMORY_GB"


@dataclass(frozen=True, slots=True)
class FakeGpus:
    count: int
    memory_bytes: int


def fake_gpus() -> FakeGpus | None:
    """The fake GPUs that the environment asks for."""
    if not os.environ.get(COUNT):
        return None
    try:
        count, memory_gb = int(os.environ[COUNT]), float(os.environ.get(MEMORY, "80"))
    except ValueError as error:
        raise UsageError(f"{COUNT} is a number of GPUs, {MEMORY} a number of GiB: {error}") from None
    return FakeGpus(count, int(memory_gb * 2**30)) if count > 0 else None
