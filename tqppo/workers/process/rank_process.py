"""The process of one rank: a worker, its place among the ranks, and its device. Made by a group as a Ray actor."""

from __future__ import annotations

from typing import Any

import ray
import torch
import torch.distributed as dist

from tqppo.queue.meta import BatchMeta
from tqppo.workers.compute.worker import Worker, prepare_process
from tqppo.workers.process.ranks import Ranks, join, leave, open_store
from tqppo.workers.specs import RoleSpec


class RankProcess:
    def __init__(
        self,
        role: str,
        worker_class: type[Worker],
        spec: RoleSpec,
        rank: int,
        size: int,
        queue: Any,
        has_gpu: bool,
    ) -> None:
        self._name = f"{role}-{rank}"
        self._ranks = Ranks(rank, size)
        self._device = torch.device("cuda" if has_gpu else "cpu")
        self._store: dist.TCPStore | None = None
        self._worker = worker_class(spec, ranks=self._ranks, queue=queue, device=self._device.type)

    def __repr__(self) -> str:
        return self._name  # what Ray writes before this process's log lines

    def open(self) -> tuple[str, int]:
        """On rank 0: where the others find it."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def start(self, address: tuple[str, int], *, is_one_node: bool, timeout_s: float) -> None:
        prepare_process(self._worker.spec, self._device)
        # FSDP, which also casts the computation to a smaller type, needs a process group even of one rank.
        needs_group = self._ranks.size > 1 or self._worker.dtype != torch.float32
        if needs_group:
            store = self._store or dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            join(self._ranks, self._device, store, timeout_s=timeout_s, is_one_node=is_one_node)
        self._worker.start()

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A remote method; of a batch that it extended only the names of the columns go back."""
        result = getattr(self._worker, name)(*arguments, **named)
        return result.columns if isinstance(result, BatchMeta) else result

    def close(self) -> None:
        self._worker.close()
        leave()
