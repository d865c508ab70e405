"""What a step is made of: the stages that both trainers share, each taking a batch and giving one back.

A batch is metadata; what a stage adds to its rows is in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from tqppo.algorithms.kl import Controller
from tqppo.algorithms.padding import num_padding, padding_rows
from tqppo.prompts import Prompt
from tqppo.protocols import Sampling, WeightSource
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.queue.replay import Replay
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.worker import Assignment

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
        self.check_weights: Callable[[WeightSource], None] = lambda source: None

    def generate(self, step: int) -> BatchMeta:
        """The whole groups of this step: tokens, response_mask, rollout_logprobs, reward."""
        with self.clock.time("gen"):
            return self.replay.collect(self.num_prompts, lambda prompts: self.pool.generate(prompts, self._task(step)))

    def load_weights(self, source: WeightSource) -> None:
        with self.clock.time("update_weights"):
            self.pool.load_weights(source)
            self.check_weights(source)

    def _task(self, step: int) -> Assignment:
        from dataclasses import replace

        return replace(self.assignment, step=step)


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
            rows = padding_rows(count, self.queue.trailing(batch), step=step)
            put = self.queue.put(rows.keys, rows.columns, partition=batch.partition, tags=rows.tags)
        return BatchMeta.join([batch, put])


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


class Advantages:
    """The estimator worker, and β of the KL in the reward, which the driver steers from step to step."""

    def __init__(self, group: Any, clock: Clock, controller: Controller) -> None:
        self.group = group
        self.clock = clock
        self.controller = controller
        self.metrics: Metrics = {}

    def estimate(self, batch: BatchMeta) -> BatchMeta:
        with self.clock.time("adv"):
            batch, self.metrics = self.group.estimate(batch, kl_coef=self.controller.coef)
        if "actor/reward_kl_penalty" in self.metrics:
            self.metrics["actor/reward_kl_penalty_coeff"] = self.controller.coef
            rows = sum(not tags.get("is_padding") for tags in batch.tags)
            self.controller = self.controller.after(self.metrics["actor/reward_kl_penalty"], rows)
        return batch


@dataclass
class Stages:
    """Everything a trainer's step may use."""

    queue: Queue
    rollout: Rollout
    reward_model: Scores
    padding: Padding
    actor: Any
    old_policy: Logprobs
    reference: Logprobs
    critic: Any
    advantages: Advantages
    clock: Clock
    mini_batch_rows: int  # of the actor; 0: the whole batch
    critic_mini_batch_rows: int = 0
    critic_only_steps: int = 0

    def num_updates(self, batch: BatchMeta, rows: int) -> int:
        return len(batch) // rows if rows else 1


def sample_val(pool: RolloutPool, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int) -> None:
    """Sample answers of held-out prompts into the partition `val`; the last session of each prompt is greedy."""
    task = Assignment(
        seed=seed, step=0, group_size=samples, sampling=sampling, partition="val", greedy=True, keep_tensors=False
    )
    pool.generate(list(enumerate(prompts)), task)
