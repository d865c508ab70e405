"""Stands in for SGLang's CUDA kernels on a machine without a GPU, where none is called but all are imported.

Put on the path of a server that runs with SGLANG_USE_CPU_ENGINE, and of no other.
"""

import os
from collections.abc import Callable

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    raise ImportError("this sgl_kernel has no kernels: it only stands in on CPUs, with SGLANG_USE_CPU_ENGINE=1")

__version__ = "0.0.0+cpu"


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} is a CUDA kernel; this server runs on a CPU")

    return kernel
