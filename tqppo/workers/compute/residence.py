"""Moves a worker's tensors to host memory while another role uses its device, and back.

A tensor keeps its identity, so that FSDP, the optimizer and views of it notice nothing: only the memory behind it is
given back. The host's copies are pinned next to a GPU, and kept for the next time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class Residence:
    """Where the tensors of one worker are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: dict[int, tuple[UntypedStorage, Tensor]] = {}  # by the storage's address: it, and the host's copy
        self._away: list[int] = []

    def rest(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors to the host and free their memory on the device."""
        found = self._storages(tensors)
        self._hosts = {key: self._host_of(key, storage) for key, storage in found.items()}
        for storage, host in self._hosts.values():
            host.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in self._hosts.values():
            storage.resize_(0)
        self._away = list(found)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Bring back what `rest` took away; nothing if it took nothing."""
        for key in self._away:
            storage, host = self._hosts[key]
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._synchronize()
        self._away = []

    def held_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that these tensors take on the device now."""
        return sum(storage.nbytes() for storage in self._storages(tensors).values())

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
        """The memory behind the tensors, each once. Mapped files cannot be given back, and are not counted."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.device.type == self._device.type and storage.resizable() and storage.nbytes():
                found[storage._cdata] = storage
        return found

    def _host_of(self, key: int, storage: UntypedStorage) -> tuple[UntypedStorage, Tensor]:
        known = self._hosts.get(key)
        if known is not None and known[1].numel() == storage.nbytes():
            return known
        return storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
