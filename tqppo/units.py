"""Sizes in bytes: the unit of settings that end in `_gb`, and sizes as text. Imports nothing."""

from __future__ import annotations

GIB = 2**30


def size(num_bytes: float) -> str:
    """Bytes in the largest fitting unit, as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.1f} {unit}"
