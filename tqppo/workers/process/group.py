"""A role on its ranks: processes with a torch process group, called like one worker.

`group.add_columns(Actor.old_logprobs, batch)` splits the batch over the ranks, runs the method on each and joins the
results; the driver sees names and metrics only. A failure of any rank ends the call at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from tqppo.algorithms import balance
from tqppo.algorithms.padding import mini_batches
from tqppo.devices.seats import Seat
from tqppo.devices.turns import Turn
from tqppo.errors import DeadlineExceeded, TqppoError, WorkerError
from tqppo.processes import hosting
from tqppo.processes.host_memory import out_of_memory
from tqppo.processes.hosting import Call, Hosting, Launcher, Process, Watch, described
from tqppo.processes.nodes import num_nodes
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.workers.compute.worker import Worker
from tqppo.workers.process.bridge import Columns
from tqppo.workers.process.rank_process import RankProcess, RankSpec
from tqppo.workers.process.ranks import Ranks
from tqppo.workers.specs import RoleSpec

_GRACE_S = 2.0  # after one rank fails: how long the others may take to fail too, or to close

W = TypeVar("W", bound=Worker)
W_co = TypeVar("W_co", bound=Worker, covariant=True)
W_contra = TypeVar("W_contra", bound=Worker, contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")

ColumnsMethod = Callable[[W, Columns], Mapping[str, Tensor]]  # a stage that adds columns


class UpdateMethod(Protocol[W_contra]):
    """A stage that takes optimizer steps over this rank's mini-batches of `sizes` rows."""

    def __call__(self, worker: W_contra, rows: Columns, /, *, step: int, sizes: Sequence[int]) -> Metrics: ...


class Group(Protocol[W_co]):
    """The ranks of one role as the stages of a step see them. A method is passed as itself: `Actor.old_logprobs`."""

    def call(self, method: Callable[Concatenate[W_co, P], R], /, *arguments: P.args, **named: P.kwargs) -> R:
        """Run a method on every rank; returns rank 0's result."""

    def call_each(self, method: Callable[Concatenate[W_co, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Run a method on every rank; returns every rank's result, in rank order."""

    def ask_each(self, method: Callable[Concatenate[W_co, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Like `call_each`, for a method that leaves the device alone: the role need not have its turn."""

    def add_columns(self, method: ColumnsMethod[W_co], batch: BatchMeta) -> BatchMeta:
        """Run a stage on each rank's share of the rows; returns the batch with the columns that it wrote."""

    def update(self, method: UpdateMethod[W_co], batch: BatchMeta, *, step: int, num_mini_batches: int) -> Metrics:
        """Run an update on each rank's share of every mini-batch; returns its metrics."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's rows, mini-batch after mini-batch of `sizes` rows."""

    batch: BatchMeta
    sizes: list[int]
    places: list[int]  # in the whole batch


def split(batch: BatchMeta, ranks: int, *, num_mini_batches: int = 1) -> list[Shard]:
    """Cut a batch into mini-batches, then each of these over the ranks by workload.

    Each row goes to exactly one rank, and a mini-batch holds the same rows for any number of ranks.
    """
    is_padding = torch.tensor([bool(tags.get("is_padding")) for tags in batch.tags])
    costs = [float(balance.workload(int(tags.get("seq_len", 1)))) for tags in batch.tags]
    shards: list[list[list[int]]] = [[] for _ in range(ranks)]
    for members in mini_batches(is_padding, num_mini_batches):
        rows = members.tolist()
        for shard, part in zip(shards, _over_ranks(rows, costs, ranks), strict=True):
            shard.append(part)
    flat = [[place for part in shard for place in part] for shard in shards]
    dispatched = sorted(place for places in flat for place in places)
    assert dispatched == list(range(len(batch))), "every row must go to exactly one rank"
    names = BatchMeta(batch.partition, batch.keys, columns=batch.columns)  # ranks have no use for tags
    return [
        Shard(names.take(places), [len(part) for part in shard], places)
        for shard, places in zip(shards, flat, strict=True)
    ]


def _over_ranks(rows: list[int], costs: Sequence[float], ranks: int) -> list[list[int]]:
    if ranks == 1:
        return [rows]
    parts = balance.partition([costs[i] for i in rows], ranks, equal_count=len(rows) % ranks == 0)
    return [[rows[i] for i in part] for part in parts]


class WorkerGroup(Generic[W]):
    """The ranks of one role. `start` returns at once and `ready` waits, so that roles start side by side."""

    def __init__(
        self,
        role: str,
        worker_class: type[W],
        *,
        ranks: int,
        spec: RoleSpec,
        queue: Queue | None = None,
        seats: Sequence[Seat] = (),
        turn: Turn = Turn(),  # noqa: B008 - frozen
    ) -> None:
        self.role = role
        self._turn = turn
        assert ranks % spec.context_parallel == 0, f"{ranks} ranks in groups of {spec.context_parallel}"
        self._ranks, self._context = ranks, spec.context_parallel
        self._queue, self._timeout_s = queue, spec.timeout_s
        self._seats = seats or [Seat()] * ranks
        self._specs = [
            RankSpec(role, worker_class, spec, Ranks(rank, ranks, spec.context_parallel), device=seat.compute_device)
            for rank, seat in zip(range(ranks), self._seats, strict=True)
        ]
        self._processes: list[Process[RankProcess[W]]] = []
        self._starting: list[Call[None]] = []
        self._watch: Watch | None = None
        self._calling = threading.Lock()  # every rank gets the calls of several threads in the same order

    def start(self, launcher: Launcher) -> None:
        is_one_node = num_nodes() == 1
        queue = None if self._queue is None else self._queue.handle()
        self._processes = [
            launcher.launch(Hosting(seat), RankProcess, spec, queue)
            for spec, seat in zip(self._specs, self._seats, strict=True)
        ]
        self._watch = launcher.watch({f"{self.role} rank {rank}": each for rank, each in enumerate(self._processes)})
        opened = self._processes[0].call(RankProcess.open, is_one_node=is_one_node)
        address = cast(tuple[str, int], opened)  # the processes pass on its result
        self._starting = [
            process.call(RankProcess.start, address, is_one_node=is_one_node, timeout_s=self._timeout_s)
            for process in self._processes
        ]

    def ready(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has its model."""
        self._results(self._starting, "start", timeout_s or self._timeout_s)

    def close(self) -> None:
        """End the ranks, whatever state they are in."""
        hosting.close_all(self._processes, RankProcess.close, _GRACE_S, watch=self._watch)
        self._processes = []

    def call(self, method: Callable[Concatenate[W, P], R], /, *arguments: P.args, **named: P.kwargs) -> R:
        return self.call_each(method, *arguments, **named)[0]

    def call_each(self, method: Callable[Concatenate[W, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        with self._calling:
            self._turn.take()
            return self._everywhere(method, *arguments, **named)

    def ask_each(self, method: Callable[Concatenate[W, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        return self._everywhere(method, *arguments, **named)

    def rest(self) -> None:
        """See `turns.TurnTaker`."""
        self._everywhere(Worker.rest)

    def resume(self) -> None:
        self._everywhere(Worker.resume)

    def held_bytes(self) -> int:
        return max(self._everywhere(Worker.held_bytes))

    def _everywhere(self, method: Callable[Concatenate[W, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        calls = [process.call(RankProcess.call, method, *arguments, **named) for process in self._running(method)]
        return self._results(calls, _name(method), self._timeout_s)

    def add_columns(self, method: ColumnsMethod[W], batch: BatchMeta) -> BatchMeta:
        with self._calling:
            return self._add_columns(method, batch)

    def _add_columns(self, method: ColumnsMethod[W], batch: BatchMeta) -> BatchMeta:
        self._turn.take()
        processes, shards = self._running(method), self._shards(method, batch, 1)
        calls = [
            process.call(RankProcess.add_columns, method, shard.batch)
            for process, shard in zip(processes, shards, strict=True)
        ]
        written = self._results(calls, _name(method), self._timeout_s)
        assert len(set(written)) == 1, f"the ranks of {self.role} wrote different columns: {set(written)}"
        return batch.with_columns(*written[0])

    def update(self, method: UpdateMethod[W], batch: BatchMeta, *, step: int, num_mini_batches: int = 1) -> Metrics:
        with self._calling:
            return self._update(method, batch, step=step, num_mini_batches=num_mini_batches)

    def _update(self, method: UpdateMethod[W], batch: BatchMeta, *, step: int, num_mini_batches: int) -> Metrics:
        self._turn.take()
        processes, shards = self._running(method), self._shards(method, batch, num_mini_batches)
        calls = [
            process.call(RankProcess.update, method, shard.batch, step=step, sizes=shard.sizes)
            for process, shard in zip(processes, shards, strict=True)
        ]
        # The ranks have added their metrics up among themselves, so that all return the same.
        metrics = self._results(calls, _name(method), self._timeout_s)[0]
        self._turn.count()  # the first update makes the optimizer's state
        return metrics

    def _shards(self, method: object, batch: BatchMeta, num_mini_batches: int) -> list[Shard]:
        assert len(batch), f"{self.role}.{_name(method)} was given an empty batch"
        """Each rank's shard; neighbours that compute rows together have the same one."""
        shards = split(batch, self._ranks // self._context, num_mini_batches=num_mini_batches)
        return [shard for shard in shards for _ in range(self._context)]

    def _running(self, method: object) -> list[Process[RankProcess[W]]]:
        if not self._processes:
            raise WorkerError(f"{self.role}.{_name(method)}: the {self.role} group is not running")
        return self._processes

    def _results(self, calls: Sequence[Call[R]], name: str, timeout_s: float) -> list[R]:
        """All results, or the first failure as soon as it happens: the other ranks would wait for it for ever."""
        settled = hosting.settle(calls, timeout_s, grace_s=_GRACE_S, watch=self._watch)
        if settled.failures:
            self._fail(name, settled.failures)
        if settled.still:
            self._end()
            raise WorkerError(f"{self.role}.{name}: {'; '.join(settled.still)}")
        if settled.pending:
            self._end()
            silent = ", ".join(map(str, settled.pending))
            raise DeadlineExceeded(f"{self.role}.{name}: no answer from rank {silent} within {timeout_s:g} s")
        return [call.result() for call in calls]

    def _fail(self, name: str, failures: Mapping[int, BaseException]) -> NoReturn:
        self._end()
        for rank, error in failures.items():
            if isinstance(error, TqppoError):
                raise type(error)(f"{self.role} rank {rank}: {error}") from error
            if (full := out_of_memory(error, f"{self.role} rank {rank}, in {name}")) is not None:
                raise full from error
        said = [f"{self.role} rank {rank} failed in {name}:\n{described(error)}" for rank, error in failures.items()]
        raise WorkerError("\n".join(said)) from next(iter(failures.values()))

    def _end(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()


def _name(method: object) -> str:
    return str(getattr(method, "__name__", method))
