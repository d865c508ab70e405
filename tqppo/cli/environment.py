"""`env`: versions and devices for bug reports. Reads package metadata and imports none of the packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

from tqppo.cli.options import AsJson
from tqppo.cli.output import emit_json, say
from tqppo.space import SHARED_MEMORY
from tqppo.units import size

PACKAGES = (
    "tqppo", "torch", "transformers", "ray", "tokenizers", "safetensors", "pydantic", "typer", "numpy", "pyarrow",
    "TransferQueue", "peft", "math-verify", "reasoning-gym", "wandb", "tensorboard",
)  # fmt: skip


def show(as_json: AsJson = False) -> None:
    """Print versions and devices, for bug reports."""
    facts = {"system": _system(), "packages": _packages(), "gpus": _gpus(), "engines": _engines()}
    if as_json:
        emit_json(facts)
        return
    for section, values in facts.items():
        say(f"{section}:")
        lines = [f"{key}: {value}" for key, value in values.items()] if isinstance(values, dict) else values
        say("\n".join(f"  {line}" for line in lines or ["none"]))


def _system() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "cpus": str(_usable_cpus()),
        "memory": size(memory),
        "shared memory": f"{size(shared.free)} free of {size(shared.total)}" if shared else "none",
    }


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _packages() -> dict[str, str]:
    return {name: _version_of(name) for name in PACKAGES}


def _version_of(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return ["nvidia-smi did not answer within 10 s"]
    if answer.returncode:
        return [f"nvidia-smi failed: {(answer.stdout + answer.stderr).strip()}"]
    return answer.stdout.strip().splitlines()


def _engines() -> dict[str, str]:
    from tqppo.engines import environments as engines

    return {
        name: str(engines.folder_of(name)) if engines.is_installed(name) else "no environment"
        for name in engines.ENVIRONMENTS
    }
