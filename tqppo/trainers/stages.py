"""What a step is made of: the stages that both trainers share, each taking a batch and giving one back.

A batch is metadata; what a stage adds to its rows is in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from tqppo.algorithms.kl import Controller
from tqppo.algorithms.padding import num_padding, padding_rows
from tqppo.columns import column
from tqppo.metrics.files import spread
from tqppo.protocols import WeightSource
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.ray_calls import results
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.pool import RolloutPool
from tqppo.trainers.groups import Replay
from tqppo.weights.verify import Probe

Metrics = dict[str, float]


class Clock:
    """Seconds per stage of the current step, in the order of the stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - start

    def take(self) -> Metrics:
        seconds, self.seconds = self.seconds, {}
        return {f"timing_s/{stage}": value for stage, value in seconds.items()}


class Rollout:
    """Sampling on one side, weights on the other."""

    def __init__(self, pool: RolloutPool, replay: Replay, clock: Clock, *, assignment: Assignment, num_prompts: int):
        self.pool = pool
        self.replay = replay
        self.clock = clock
        self.assignment = assignment
        self.num_prompts = num_prompts
        self.num_tokens = 0
        self.metrics: Metrics = {}
        self.probe: Callable[[], Probe | None] = lambda: None  # what the trainer says of a sequence, after an update

    def generate(self, step: int) -> BatchMeta:
        """The whole groups of this step: tokens, response_mask, rollout_logprobs, reward."""
        task = replace(self.assignment, step=step)
        with self.clock.time("gen"):
            batch = self.replay.collect(self.num_prompts, lambda prompts: self.pool.generate(prompts, task))
        self.num_tokens = sum(tags["seq_len"] for tags in batch.tags)
        self.metrics = {**self.replay.counts, **tag_metrics(batch.tags)}
        return batch

    def load_weights(self, source: WeightSource) -> None:
        with self.clock.time("update_weights"):
            self.pool.load_weights(source, self.probe())


class Padding:
    """Fills a batch up so that mini-batches and ranks get equal shares. Padding rows hold neutral values only."""

    def __init__(self, queue: Queue, clock: Clock, *, multiple: int) -> None:
        self.queue = queue
        self.clock = clock
        self.multiple = multiple
        self.metrics: Metrics = {}

    def fill(self, batch: BatchMeta, step: int) -> BatchMeta:
        count = num_padding(len(batch), self.multiple)
        total = len(batch) + count
        self.metrics = {
            "padding/rows": float(count),
            "padding/fraction": count / total,
            "padding/multiple": float(self.multiple),
        }
        if not count:
            return batch
        with self.clock.time("pad"):
            rows = padding_rows(count, self._sizes(batch), step=step)
            put = self.queue.put(rows.keys, rows.columns, partition=batch.partition, tags=rows.tags)
        return BatchMeta.join([batch, put])

    def _sizes(self, batch: BatchMeta) -> dict[str, tuple[int, ...]]:
        """Each column's sizes beyond the ragged one; only where the declaration leaves them open is a row looked at."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name in batch.columns:
            declared = column(name).trailing
            known = tuple(size for size in declared if size is not None)
            if len(known) < len(declared):
                known = tuple(self.queue.get(batch.take([0]), [name])[name].values().shape[1:])
            sizes[name] = known
        return sizes


class Scores(Protocol):
    def score(self, batch: BatchMeta) -> BatchMeta: ...


class Logprobs(Protocol):
    def logprobs(self, batch: BatchMeta) -> BatchMeta: ...


class Absent:
    """A stage that this run does without: batches pass unchanged."""

    def score(self, batch: BatchMeta) -> BatchMeta:
        return batch

    def logprobs(self, batch: BatchMeta) -> BatchMeta:
        return batch


class Timed:
    """A worker group whose calls appear in the step's timings under the names that dashboards know."""

    def __init__(self, group: Any, clock: Clock, **stages: str) -> None:
        self.group = group
        self.clock = clock
        self.stages = stages

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self.group, method)
        stage = self.stages.get(method)
        if stage is None:
            return call

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.time(stage):
                return call(*args, **kwargs)

        return timed


class Learner(Timed):
    """A group that learns, and how its batch is cut: rows per optimizer step, 0 for all of them."""

    def __init__(self, group: Any, clock: Clock, *, timed_as: str, mini_batch_rows: int, **stages: str) -> None:
        super().__init__(group, clock, **stages)
        self.timed_as = timed_as
        self.mini_batch_rows = mini_batch_rows

    def update(self, batch: BatchMeta, step: int) -> Metrics:
        count = len(batch) // self.mini_batch_rows if self.mini_batch_rows else 1
        with self.clock.time(self.timed_as):
            return self.group.update(batch, step=step, num_mini_batches=count)


class Advantages:
    """The estimator worker, and β of the KL in the reward, which the driver steers from step to step."""

    def __init__(
        self,
        worker: Any,
        clock: Clock,
        controller: Controller,
        *,
        timeout_s: float,
        dump_to: Callable[[int], Path | None] = lambda step: None,
    ) -> None:
        self.worker = worker
        self.clock = clock
        self.controller = controller
        self.timeout_s = timeout_s
        self.dump_to = dump_to  # where a step's trajectories are written, if they are
        self.metrics: Metrics = {}

    def estimate(self, batch: BatchMeta, step: int) -> BatchMeta:
        batch = self._estimate(batch)
        if path := self.dump_to(step):
            with self.clock.time("dump_rollout_generations"):
                results([self.worker.dump.remote(batch, str(path))], self.timeout_s, "writing trajectories")
        return batch

    def _estimate(self, batch: BatchMeta) -> BatchMeta:
        with self.clock.time("adv"):
            call = self.worker.estimate.remote(batch, self.controller.coef)
            columns, self.metrics = results([call], self.timeout_s, "the estimator")[0]
        if "actor/reward_kl_penalty" in self.metrics:
            self.metrics["actor/reward_kl_penalty_coeff"] = self.controller.coef
            rows = sum(not tags.get("is_padding") for tags in batch.tags)
            self.controller = self.controller.after(self.metrics["actor/reward_kl_penalty"], rows)
        return batch.with_columns(*columns)


@dataclass
class Stages:
    """Everything a trainer's step may use."""

    queue: Queue
    rollout: Rollout
    reward_model: Scores
    padding: Padding
    actor: Learner
    old_policy: Logprobs
    reference: Logprobs
    advantages: Advantages
    clock: Clock


def tag_metrics(tags: Sequence[Mapping[str, Any]]) -> Metrics:
    """Turns and the reward function's further numbers, over sessions (by their last row)."""
    last = {(tag["uid"], tag["session"]): tag for tag in tags}
    extras: dict[str, list[float]] = {}
    for tag in last.values():
        for name, value in tag.get("extra", {}).items():
            extras.setdefault(name, []).append(value)
    found = spread("training/num_turns", [float(tag["turns"]) for tag in last.values()])
    return found | {f"reward/{name}/mean": sum(values) / len(values) for name, values in extras.items()}
