"""Between a worker's methods, which see tensors, and batches, which are names: columns in, columns out.

A method that implements a stage of the step is marked with that stage of `dataflow`. `run_columns` fetches the columns
that the stage reads, calls the method, and puts the columns it returns back on the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import Tensor

from tqppo.dataflow import Features, Stage
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.workers.process.ranks import Ranks

Columns = Mapping[str, Tensor]  # jagged nested tensors, or one dense tensor where each row has one value
Method = TypeVar("Method", bound=Callable[..., object])


class StageWorker(Protocol):
    """What the bridge needs of a worker."""

    @property
    def features(self) -> Features: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def ranks(self) -> Ranks: ...


def implements(stage: Stage) -> Callable[[Method], Method]:
    """Mark a worker's method as the one that computes this stage."""

    def mark(method: Method) -> Method:
        method.__dict__["stage"] = stage
        return method

    return mark


def stage_of(method: Callable[..., object]) -> Stage:
    stage = method.__dict__.get("stage")
    assert isinstance(stage, Stage), f"{method.__qualname__} implements no stage; mark it with @implements"
    return stage


def run_columns(
    worker: StageWorker, method: Callable[..., Mapping[str, Tensor]], batch: BatchMeta, **named: object
) -> tuple[str, ...]:
    """Compute a stage that adds columns to these rows; returns the names of the columns."""
    stage, features = stage_of(method), worker.features
    result = method(worker, worker.queue.get(batch, stage.reads(features)), **named)
    written = stage.writes(features)
    assert set(result) == set(written), f"{method.__qualname__} returned {set(result)}, {stage.name} writes {written}"
    if worker.ranks.place == 0:  # the others have computed the same rows
        worker.queue.put(batch, result)
    return written


def run_update(worker: StageWorker, method: Callable[..., Metrics], batch: BatchMeta, **named: object) -> Metrics:
    """Compute a stage that changes the worker and returns metrics."""
    return method(worker, worker.queue.get(batch, stage_of(method).reads(worker.features)), **named)
