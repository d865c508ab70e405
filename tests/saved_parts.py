"""Reads tensors that one or several ranks have saved."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tqppo.weights.parts import Parts


def all_parts(folder: Path, kind: str) -> dict[str, Tensor]:
    """Every tensor, whole."""
    parts = Parts.open(folder, kind)
    return {name: parts.whole(name) for name in parts.names}
