"""TransferQueueStorage: blocks in the PyPI package TransferQueue (extra `transferqueue`), with our index on top.

A block is one row of one field of TransferQueue, which avoids its cost per row and column. Missing data is an error,
and every call has a deadline. Its limits remain: one such storage per Ray cluster, an unauthenticated port on the
node's address, and pickle on the wire. Prefer `simple` or `ray` unless TransferQueue is required.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import ray
import torch

from tqppo.errors import BackendError
from tqppo.processes.ray_calls import this_node
from tqppo.queue.blocks.block import Block, BlockView, parse
from tqppo.queue.link.calls import START_S, Pending
from tqppo.queue.storage import Locator, StorageSpec

T = TypeVar("T")

FIELD = "block"
UNITS = 1  # storage processes; TransferQueue reserves a CPU for each


class TransferQueueStorage:
    def __init__(self, spec: StorageSpec) -> None:
        if importlib.util.find_spec("transfer_queue") is None:
            raise BackendError("storage 'transferqueue' is an extra: pip install 'tqppo[transferqueue]'")
        if not spec.distributed:
            raise BackendError("storage 'transferqueue' needs Ray; use storage 'simple' for a queue in one process")
        self.spec = spec
        self._thread: CallThread | None = None
        self._is_attached = False
        self._is_founder = False  # started TransferQueue, and stops it
        self._node = ""

    async def start(self, node: str) -> None:
        """Start TransferQueue for the first node; it serves the other nodes too."""
        await self._call("start", self._client, START_S)

    async def write(self, block: Block) -> Locator:
        name, data = block.layout.block, torch.from_numpy(block.flat())
        await self._call("write", lambda: self._put(name, data))
        return Locator(self.node, name, block.num_bytes)

    async def read(self, locators: Sequence[Locator], columns: Sequence[str] | None) -> list[BlockView | None]:
        names = [locator.block for locator in locators]
        return await self._call("read", lambda: self._get(names))

    def free(self, locators: Sequence[Locator]) -> None:
        names = [locator.block for locator in locators]
        self._submit(lambda: self._client().kv_clear(names, self.spec.run))

    def sweep(self, known: Sequence[Locator], older_than_s: float) -> None:
        names = {locator.block for locator in known}

        def work() -> None:
            written = self._client().kv_list(self.spec.run).get(self.spec.run, {})
            old = time.time() - older_than_s
            dead = [name for name, tag in written.items() if name not in names and tag["written_at"] < old]
            if dead:
                self._client().kv_clear(dead, self.spec.run)

        self._submit(work)

    async def close(self) -> None:
        if self._is_founder:
            await self._call("close", transfer_queue_close)
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    @property
    def node(self) -> str:
        self._node = self._node or this_node()
        return self._node

    def _put(self, name: str, data: torch.Tensor) -> None:
        self._client().kv_put(
            key=name, partition_id=self.spec.run, fields={FIELD: data}, tag={"written_at": time.time()}
        )

    def _get(self, names: Sequence[str]) -> list[BlockView | None]:
        client = self._client()
        there = client.kv_list(self.spec.run).get(self.spec.run, {})
        wanted = [name for name in names if name in there]  # TransferQueue omits missing rows silently
        if not wanted:
            return [None] * len(names)
        found = client.kv_batch_get(wanted, self.spec.run, select_fields=[FIELD])[FIELD].unbind()
        views = {name: _view(row) for name, row in zip(wanted, found, strict=True)}
        return [views.get(name) for name in names]

    def _client(self) -> ModuleType:
        """The package, connected. Runs in the call thread, because it blocks on Ray and sockets."""
        import transfer_queue
        from omegaconf import OmegaConf

        if not self._is_attached:
            controller = _controller()
            if controller is None:
                self._check_cpu()
            if controller is None or controller != _attached.get("controller"):
                transfer_queue.close()  # drops this process's connection to an earlier queue
                transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": UNITS}}}))
                self._is_founder = controller is None
                _attached["controller"] = _controller()
            self._is_attached = True
        return cast(ModuleType, transfer_queue)

    def _check_cpu(self) -> None:
        """Raise if Ray has too few free CPUs; TransferQueue would wait for them forever."""
        resources: Callable[[], dict[str, float]] = ray.available_resources  # Ray leaves it untyped
        free = resources().get("CPU", 0.0)
        if free < UNITS + 1:
            raise BackendError(
                f"storage 'transferqueue' reserves {UNITS + 1} CPUs for itself, and Ray has {free:g} to spare; "
                "use storage 'simple' or 'ray', or a larger cluster"
            )

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = CallThread()
        return self._thread.submit(call)

    def _call(self, name: str, call: Callable[[], T], timeout_s: float = 0.0) -> Pending[T]:
        """Run a call in the thread, within `timeout_s` or, if that is longer, the queue's own deadline."""
        future = self._submit(call)
        pending = Pending(future, lambda: f"TransferQueue did not answer to {name}", lambda: not future.done())
        return pending.within(max(self.spec.timeout_s, timeout_s))


class CallThread:
    """Runs calls one after the other. Unlike an executor, it does not keep the process alive if a call never ends."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transferqueue", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (next_call := self._calls.get()) is not None:
            call, future = next_call
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 (the caller handles it)
                future.set_exception(error)


def _view(row: torch.Tensor) -> BlockView:
    whole = np.ascontiguousarray(row.reshape(-1).numpy())
    return BlockView(parse(whole), whole=whole, writable=True)


_attached: dict[str, str | None] = {"controller": None}  # the package keeps one connection per process


def _controller() -> str | None:
    """The id of the TransferQueue that runs in this cluster; None if none does."""
    try:
        return str(ray.get_actor("TransferQueueController", namespace="transfer_queue")._actor_id.hex())
    except ValueError:
        return None


def transfer_queue_close() -> None:
    import transfer_queue

    transfer_queue.close()
    _attached["controller"] = None
