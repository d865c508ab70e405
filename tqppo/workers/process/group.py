"""A role on its ranks: Ray actors with a torch process group, called like one worker.

`group.logprobs(batch)` splits the batch over the ranks, runs the worker's method on each and joins the
results; the driver sees names and metrics only. A failure of any rank ends the call at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch

from tqppo.algorithms import balance
from tqppo.algorithms.padding import mini_batches
from tqppo.errors import DeadlineExceeded, TqppoError, WorkerError
from tqppo.queue.meta import BatchMeta
from tqppo.workers.compute.worker import Worker
from tqppo.workers.process.bridge import Remote, remote_methods
from tqppo.workers.process.rank_process import RankProcess
from tqppo.workers.specs import RoleSpec

_LAST_WORDS_S = 2.0  # when one rank fails, how long the others may take to say that they failed too


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's rows, mini-batch after mini-batch of `sizes` rows."""

    batch: BatchMeta
    sizes: list[int]
    places: list[int]  # in the whole batch


def split(batch: BatchMeta, ranks: int, *, num_mini_batches: int = 1) -> list[Shard]:
    """Mini-batches first, then each over the ranks by workload: the maths does not see how many ranks there are.

    Each row goes to exactly one rank.
    """
    is_padding = torch.tensor([bool(tags.get("is_padding")) for tags in batch.tags])
    costs = [float(balance.workload(int(tags.get("seq_len", 1)))) for tags in batch.tags]
    shards: list[list[list[int]]] = [[] for _ in range(ranks)]
    for members in mini_batches(is_padding, num_mini_batches):
        rows = members.tolist()
        for shard, part in zip(shards, _over_ranks(rows, costs, is_padding.tolist(), ranks), strict=True):
            shard.append(part)
    flat = [[place for part in shard for place in part] for shard in shards]
    dispatched = sorted(place for places in flat for place in places)
    assert dispatched == list(range(len(batch))), "every row must go to exactly one rank"
    names = BatchMeta(batch.partition, batch.keys, columns=batch.columns)  # ranks have no use for tags
    return [
        Shard(names.take(places), [len(part) for part in shard], places)
        for shard, places in zip(shards, flat, strict=True)
    ]


def _over_ranks(rows: list[int], costs: Sequence[float], is_padding: Sequence[bool], ranks: int) -> list[list[int]]:
    if ranks == 1:
        return [rows]
    parts = balance.partition(
        [costs[i] for i in rows],
        ranks,
        equal_count=len(rows) % ranks == 0,
        is_padding=[is_padding[i] for i in rows],
    )
    return [[rows[i] for i in part] for part in parts]


class WorkerGroup:
    """The ranks of one role. `start` returns at once and `ready` waits, so that roles start side by side."""

    def __init__(
        self,
        role: str,
        worker_class: type[Worker],
        *,
        ranks: int,
        spec: RoleSpec,
        queue: Any = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
    ) -> None:
        self.role = role
        self.last_timings: dict[str, float] = {}
        """Seconds that the calls since `take_timings` took, as metrics: `timing_s/actor_update`."""
        self._worker_class, self._ranks, self._spec, self._queue = worker_class, ranks, spec, queue
        self._cpus, self._gpus, self._timeout_s = cpus, gpus, spec.timeout_s
        self._methods = remote_methods(worker_class)
        self._processes: list[Any] = []
        self._starting: list[Any] = []

    def start(self) -> None:
        is_one_node = sum(node["Alive"] for node in ray.nodes()) == 1
        make = ray.remote(RankProcess).options(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0)
        self._processes = [
            make.remote(self.role, self._worker_class, self._spec, rank, self._ranks, self._queue, self._gpus > 0)
            for rank in range(self._ranks)
        ]
        address = self._processes[0].open.remote()
        self._starting = [
            process.start.remote(address, is_one_node=is_one_node, timeout_s=self._timeout_s)
            for process in self._processes
        ]

    def ready(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has its model."""
        self._collect(self._starting, "start", timeout_s)

    def close(self) -> None:
        """End the ranks, whatever state they are in."""
        processes, self._processes = self._processes, []
        closing = [process.close.remote() for process in processes]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_LAST_WORDS_S)
        for process in processes:
            ray.kill(process)

    def take_timings(self) -> dict[str, float]:
        taken, self.last_timings = self.last_timings, {}
        return taken

    def __getattr__(self, name: str) -> Callable[..., Any]:
        how = self.__dict__.get("_methods", {}).get(name)
        if how is None:
            raise AttributeError(f"{type(self).__name__} has no attribute or remote method {name!r}")
        return partial(self._call, name, how)

    def _call(self, name: str, how: Remote, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            if how.takes_batch:
                return self._over_batch(name, how, *arguments, **named)
            return self._everywhere(name, [(arguments, named)] * self._ranks)[0]
        finally:
            key = f"timing_s/{self.role}_{name}"
            self.last_timings[key] = self.last_timings.get(key, 0.0) + time.perf_counter() - began

    def _over_batch(self, name: str, how: Remote, batch: BatchMeta, **named: Any) -> Any:
        assert len(batch), f"{self.role}.{name} was given an empty batch"
        shards = split(batch, self._ranks, num_mini_batches=named.get("num_mini_batches", 1))
        has_sizes = "num_mini_batches" in named
        calls = [((s.batch,), {**named, "sizes": s.sizes} if has_sizes else named) for s in shards]
        results = self._everywhere(name, calls)
        if not how.writes:
            return results[0]  # metrics; the ranks have added them up among themselves
        assert len(set(results)) == 1, f"the ranks of {self.role} wrote different columns: {set(results)}"
        return batch.with_columns(*results[0])

    def _everywhere(self, name: str, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        if not self._processes:
            raise WorkerError(f"the {self.role} group is not running")
        refs = [
            process.call.remote(name, *arguments, **named)
            for process, (arguments, named) in zip(self._processes, calls, strict=True)
        ]
        return self._collect(refs, name)

    def _collect(self, refs: Sequence[Any], name: str, timeout_s: float | None = None) -> list[Any]:
        """All results, or the first failure as soon as it happens: the other ranks would wait for it for ever."""
        pending, deadline = list(refs), time.monotonic() + (timeout_s or self._timeout_s)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self._abandon(refs, name, pending)
            failures = _failures(done, refs)
            if failures:
                late, _ = ray.wait(pending, num_returns=len(pending), timeout=_LAST_WORDS_S) if pending else ([], [])
                self._fail(name, failures | _failures(late, refs))
        return ray.get(list(refs))

    def _abandon(self, refs: Sequence[Any], name: str, pending: Sequence[Any]) -> None:
        silent = ", ".join(str(rank) for rank, ref in enumerate(refs) if ref in pending)
        self._end()
        raise DeadlineExceeded(f"{self.role}.{name}: no answer from rank {silent} within {self._timeout_s:g} s")

    def _fail(self, name: str, failures: dict[int, Exception]) -> None:
        self._end()
        causes = {rank: getattr(error, "cause", None) or error for rank, error in failures.items()}
        for rank, cause in causes.items():
            if isinstance(cause, TqppoError):
                raise type(cause)(f"{self.role} rank {rank}: {cause}") from failures[rank]
        told = "\n".join(f"{self.role} rank {rank} failed in {name}:\n{error}" for rank, error in failures.items())
        raise WorkerError(told)

    def _end(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            ray.kill(process)


def _failures(done: Sequence[Any], refs: Sequence[Any]) -> dict[int, Exception]:
    failures: dict[int, Exception] = {}
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            failures[refs.index(ref)] = error
    return failures
