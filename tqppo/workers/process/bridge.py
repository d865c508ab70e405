"""`remote`, the one decorator of worker methods: written over tensors, called over a batch or over tensors alike.

With a `BatchMeta` the method's columns are fetched from the queue, and the columns it returns are put
back on the same rows. With tensors it is the plain method. Nothing is opened or started per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tqppo.queue.meta import BatchMeta

Columns = Mapping[str, Any]  # jagged nested tensors, or one dense tensor per row value
Reads = tuple[str, ...] | Callable[[Any], tuple[str, ...]]  # or chosen by the worker's own settings
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Remote:
    """How a method meets the queue. Without `reads` it takes no batch, and runs on every rank as it is."""

    reads: Reads
    writes: tuple[str, ...]

    @property
    def takes_batch(self) -> bool:
        return bool(self.reads)


def remote(*, reads: Reads = (), writes: tuple[str, ...] = ()) -> Callable[[Method], Method]:
    """Mark a worker's method as callable through its group. `writes` are the columns it may return."""

    def decorate(method: Method) -> Method:
        bridged: Any = _bridged(method, reads, writes) if reads else method
        bridged.remote = Remote(reads, writes)
        return bridged

    return decorate


def _bridged(method: Any, reads: Reads, writes: tuple[str, ...]) -> Any:
    @functools.wraps(method)
    def call(self: Any, batch: BatchMeta | Columns, **arguments: Any) -> Any:
        if not isinstance(batch, BatchMeta):
            return method(self, batch, **arguments)
        columns = reads if isinstance(reads, tuple) else reads(self)
        result = method(self, self.queue.get(batch, columns), **arguments)
        if not writes:
            return result  # metrics
        unexpected = set(result) - set(writes)
        assert not unexpected, f"{method.__qualname__} returned {unexpected}, and declares {writes}"
        return self.queue.put(batch, result)

    return call


def remote_methods(worker_class: type) -> dict[str, Remote]:
    """The methods of a worker class that a group can call."""
    found = {name: getattr(getattr(worker_class, name), "remote", None) for name in dir(worker_class)}
    return {name: how for name, how in found.items() if how is not None}
