"""Weights that the trainer publishes: the model's parameters point into the mapped file, with no copy.

The trainer may rename another file over it or update it in place; it must not truncate it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tqppo.errors import EngineError
from tqppo.weights.checksum import checksum
from tqppo.weights.file import MODEL_FILE, MappedFile


def _map(path: Path) -> tuple[MappedFile, dict[str, Tensor]]:
    try:
        mapped = MappedFile.open(path)
        return mapped, {name: mapped.tensor(name) for name in mapped.places}
    except OSError as error:
        raise EngineError(f"cannot map the weights {path}: {error}") from error
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"{path} is not a readable safetensors file: {error}") from error


class Weights:
    """The parameters of one model, and the file they point into."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners: dict[int, tuple[Tensor, list[str]]] = {}  # tied parameters are one tensor with several names
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._owners.setdefault(id(tensor), (tensor, []))[1].append(name)
        self._mapped: MappedFile | None = None

    def load(self, folder: str) -> None:
        """Point every parameter into the folder's file, unless they point there already."""
        path = Path(folder) / MODEL_FILE
        mapped, tensors = _map(path)
        known = self._mapped
        if known is not None and (known.identity, known.header) == (mapped.identity, mapped.header):
            return
        self._check(tensors, path)
        is_shared = True
        for tensor, names in self._owners.values():
            source = next(tensors[name] for name in names if name in tensors)
            tensor.data = source.to(device=tensor.device, dtype=tensor.dtype)
            is_shared = is_shared and tensor.data.data_ptr() == source.data_ptr()
        # A copy does not follow the file, so only parameters that point into it may skip the next load.
        self._mapped = mapped if is_shared else None

    def checksums(self) -> dict[str, str]:
        """Checksums of all parameters as they are now; a tied one has several names."""
        found: dict[str, str] = {}
        for tensor, names in self._owners.values():
            found |= dict.fromkeys(names, checksum(tensor))
        return found

    def _check(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Raise unless the file has exactly the model's parameters, in their shapes."""
        expected = {name for _, names in self._owners.values() for name in names}
        missing = [names[0] for _, names in self._owners.values() if not tensors.keys() & set(names)]
        extra = sorted(tensors.keys() - expected)
        wrong = [
            f"{name} is {list(tensors[name].shape)}, the model has {list(tensor.shape)}"
            for tensor, names in self._owners.values()
            for name in names
            if name in tensors and tensors[name].shape != tensor.shape
        ]
        faults = [
            f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
            for what, names in (("missing", missing), ("not in the model", extra), ("wrong shape", wrong))
            if names
        ]
        if faults:
            raise EngineError(f"{path} does not fit the model; {'; '.join(faults)}")
