"""The process of one rank: a worker, its place among the ranks, and its device. Worker groups launch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from tqppo.devices.memory import out_of_memory
from tqppo.errors import PreflightError
from tqppo.processes.garbage import spare_what_started
from tqppo.processes.nodes import own_address
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.space import exhausted
from tqppo.workers.compute.worker import Worker, prepare_process
from tqppo.workers.process import bridge
from tqppo.workers.process.ranks import Ranks, join, leave, open_store
from tqppo.workers.specs import RoleSpec

LOOPBACK = "127.0.0.1"
W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RankSpec(Generic[W]):
    """Which worker a rank holds, and its place in the group."""

    role: str
    worker_class: type[W]
    worker: RoleSpec
    ranks: Ranks
    device: str  # "cuda" or "cpu"


class RankProcess(Generic[W]):
    def __init__(self, spec: RankSpec[W], queue: Queue | None) -> None:
        self._name = f"{spec.role}-{spec.ranks.rank}"
        self._ranks = spec.ranks
        self._device = torch.device(spec.device)
        self._store: Store | None = None
        self._worker = spec.worker_class(spec.worker, ranks=spec.ranks, queue=queue, device=self._device.type)

    def __repr__(self) -> str:
        return self._name  # Ray writes this before the process's log lines

    def open(self, *, is_one_node: bool) -> tuple[str, int]:
        """Open the store through which the other ranks find rank 0; returns its address.

        Ranks of one node meet on loopback, and a single rank keeps its store to itself.
        """
        if self._ranks.size == 1:
            self._store = HashStore()
            return "", 0
        host = LOOPBACK if is_one_node else own_address()
        store = self._store = open_store(host)
        return host, store.port

    def start(self, address: tuple[str, int], *, is_one_node: bool, timeout_s: float) -> None:
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise PreflightError(
                f"the plan gives {self._name} a GPU; torch {torch.__version__} sees none: it is a CPU build, or the "
                "driver is missing. Install the build of torch for your CUDA version, or set cluster.gpus_per_node = 0"
            )
        prepare_process(self._worker.spec, self._device)
        # FSDP, which also casts the computation to a smaller type, needs a process group even of one rank.
        needs_group = self._ranks.size > 1 or self._worker.dtype != torch.float32
        if needs_group and not (
            self._ranks.size == 1 and torch.distributed.is_initialized()
        ):  # by a role in the same process
            store = self._store or TCPStore(*address, is_master=False, wait_for_workers=False)
            join(self._ranks, self._device, store, timeout_s=timeout_s, is_one_node=is_one_node)
        with self._explained("start"):
            self._worker.start()
        spare_what_started()

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn the error of a full GPU or disk, or of used-up descriptors, into one that says what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise out_of_memory(f"the GPU of {self._name}, in {name},", str(error).split(". ")[0]) from error
        except OSError as error:
            if (known := exhausted(error)) is None:
                raise
            raise known from error

    def call(self, method: Callable[Concatenate[W, P], R], /, *arguments: P.args, **named: P.kwargs) -> R:
        with self._explained(method.__name__):
            return method(self._worker, *arguments, **named)

    def add_columns(self, method: Callable[..., Mapping[str, Tensor]], batch: BatchMeta) -> tuple[str, ...]:
        with self._explained(method.__name__):
            return bridge.run_columns(self._worker, method, batch)

    def update(self, method: Callable[..., Metrics], batch: BatchMeta, *, step: int, sizes: list[int]) -> Metrics:
        with self._explained(method.__name__):
            return bridge.run_update(self._worker, method, batch, step=step, sizes=sizes)

    def close(self) -> None:
        self._worker.close()
        leave()
