"""What this machine has: memory, room in /dev/shm and on a disk, the GPUs that its driver knows. Imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from tqppo.config.compilation import Compilation
from tqppo.space import SHARED_MEMORY

SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes. A size of 0 is not known."""

    memory: float
    shared: float  # free in /dev/shm
    disk: float  # free where the run is to be
    gpu: float = 0.0  # memory of the smallest GPU


def this_machine(folder: Path) -> Machine:
    """This machine, with the file system that `folder` is or will be on."""
    while not folder.exists():
        folder = folder.parent
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Machine(installed_memory(), shared, shutil.disk_usage(folder).free, smallest_gpu())


def usable_cores() -> int:
    """The cores that this process may use; OMP_NUM_THREADS says fewer."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(asked)) if asked.isdigit() and int(asked) else cores


def on_this_machine(compilation: Compilation) -> Compilation:
    """The config with this machine's number of cores, unless it says one. A run keeps it, wherever it is resumed."""
    config = compilation.draft
    run = config.run.model_copy(update={"cores": config.run.cores or usable_cores()})
    return replace(compilation, draft=config.model_copy(update={"run": run}))


def installed_memory() -> float:
    """The machine's memory, or a container's limit if that is less."""
    installed = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limits = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([installed, *(float(limit) for limit in limits if limit.isdigit())])


def smallest_gpu() -> float:
    """Memory of the smallest GPU of this machine as its driver says; 0 without a driver."""
    if shutil.which(SMI[0]) is None:
        return 0.0
    try:
        said = subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0.0
    sizes = [float(line) for line in said.split() if line.replace(".", "").isdigit()]
    return min(sizes, default=0.0) * 2**20
