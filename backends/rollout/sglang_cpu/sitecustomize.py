"""Runs at the start of every Python process of an SGLang server on a CPU.

Patches four things that assume a GPU, each when its module is imported: torchvision's CUDA operators and, for seeded
sampling, the list of attention kernels with a deterministic mode, the CUDA-only matrix kernels of that mode, and the
Triton hash of seeds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def declare_torchvision_operators() -> None:
    """Define the operators whose shapes torchvision registers at import; its own definitions need CUDA."""
    import torch

    registry: Any = torch.library
    library = registry.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules["torch"].__dict__["_tqppo_torchvision"] = library  # the definitions last as long as the object


def allow_native_attention(choices: ModuleType) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def keep_cpu_kernels(operators: ModuleType) -> None:
    operators.__dict__["enable_batch_invariant_mode"] = lambda *args, **kwargs: None


def hash_with_torch(module: ModuleType) -> None:
    module.__dict__["murmur_hash32"] = counter_hash


def counter_hash(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Uniform 32-bit integers [rows, columns] that depend only on their seed, position and column."""
    import torch

    rows = _mix(seed.to(torch.int64) + _mix(positions.to(torch.int64)))
    return (_mix(rows[:, None] + _mix(columns.to(torch.int64))[None, :]) >> 32) & 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose every output bit depends on every input bit (wraps around on overflow)."""
    for shift, factor in ((32, -0x61C8864680B583EB), (29, -0x4B47D0C5E51A4E35), (32, 0)):
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        x = x * factor if factor else x
    return x


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.arg_groups.choices": allow_native_attention,
    "sglang.srt.batch_invariant_ops": keep_cpu_kernels,
    "sglang.kernels.ops.sampling.murmur_hash": hash_with_torch,
}


class Adjuster(MetaPathFinder):
    """Finds no modules itself; it runs a patch after the import of each module in `AFTER`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            importlib.import_module("torch")
            sys.meta_path.insert(0, self)
            if not _seen(name):
                declare_torchvision_operators()
            return None
        if name not in AFTER or _seen(name):
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _run_afterwards(spec.loader, AFTER[name])
        return spec


def _run_afterwards(loader: Loader, adjust: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        adjust(module)

    loader.__dict__["exec_module"] = exec_module


_names: set[str] = set()


def _seen(name: str) -> bool:
    seen = name in _names
    _names.add(name)
    return seen


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, Adjuster())
