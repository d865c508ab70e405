"""Generation ahead of training: while a step trains, the engines sample the groups of later steps.

With `rollout.ahead = k`, step N trains on groups that the weights of step N - 1 - k sampled; the first steps, on groups
of the initial weights. The engines work in one fixed order: load the weights of step N - 1, sample the groups of step
N + k, and so on. So the weights of a group follow from its step alone, and two runs of one seed end in the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

from tqppo.data.prompts import Prompt
from tqppo.errors import CheckpointError
from tqppo.metrics.files import spread
from tqppo.processes.in_order import InOrder
from tqppo.protocols import Metrics, WeightSource
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.trainers.side_by_side import Clock
from tqppo.trainers.stages import Engines, RolloutStage
from tqppo.weights.verify import Probe

Sampled = tuple[BatchMeta, Metrics]
NewWeights = tuple[WeightSource, Probe | None]


class SavedStep(TypedDict):
    """The groups of a step that a checkpoint holds: their rows are in its snapshot of the queue."""

    step: int
    keys: list[str]
    metrics: Metrics


@dataclass
class PromptsInFlight:
    """Engines that note the prompts of each step, so that rows of steps in flight can be told from lost ones."""

    engines: Engines
    uids: dict[int, set[str]] = field(default_factory=dict)  # by step
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport:
        self.add(task.step, (prompt.uid for _, prompt in prompts))
        return self.engines.generate(prompts, task)

    def load_weights(self, source: WeightSource, probe: Probe | None = None) -> float | None:
        return self.engines.load_weights(source, probe)

    def add(self, step: int, uids: Iterable[str]) -> None:
        with self.lock:
            self.uids.setdefault(step, set()).update(uids)

    def drop(self, step: int) -> None:
        with self.lock:
            self.uids.pop(step, None)

    def includes(self, uid: str) -> bool:
        with self.lock:
            return any(uid in uids for uids in self.uids.values())


@dataclass
class RolloutAhead:
    """The rollout stage of a run whose engines are up to `ahead` steps in front of training.

    `rollout` has a clock of its own, because the engines work while other stages are timed.
    """

    rollout: RolloutStage
    engines: PromptsInFlight
    work: InOrder
    clock: Clock
    ahead: int
    last_step: int
    begun: int = 0  # the last step whose groups are sampled or being sampled
    in_flight: dict[int, Future[Sampled]] = field(default_factory=dict)  # by step
    version: int = 0  # of the weights that training has reached
    new_weights: NewWeights | None = None  # for the engines to load before they sample the next step
    loaded: Metrics = field(default_factory=dict)  # of new weights that were loaded for a validation

    def generate(self, step: int) -> Sampled:
        """The step's groups, which were begun `ahead` steps ago; has the engines begin those of a later step."""
        for each in range(self.begun + 1, min(step + self.ahead, self.last_step) + 1):
            self._begin(each)
        with self.clock.time("gen"):
            batch, metrics = self.in_flight[step].result()
        del self.in_flight[step]
        self.engines.drop(step)
        return batch, metrics | versions_behind(batch, self.version)

    def load_weights(self, source: WeightSource) -> Metrics:
        """Note the new weights; the engines load them once they have sampled what they have begun."""
        with self.clock.time("update_weights"):
            self.new_weights = source, self.rollout.probe()
        self.version = source.version
        return {}

    def _begin(self, step: int) -> None:
        weights, self.new_weights = self.new_weights, None
        loaded, self.loaded = self.loaded, {}
        self.begun = step
        self.in_flight[step] = self.work.submit(partial(self._sample, step, weights, loaded))

    def _sample(self, step: int, weights: NewWeights | None, loaded: Metrics) -> Sampled:
        """Runs where the engines' work is done, in the order of the steps."""
        loaded = loaded if weights is None else self.rollout.load(*weights)
        batch, metrics = self.rollout.generate(step)
        seconds = self.rollout.clock.take()
        return batch, metrics | loaded | {"perf/generation_s": sum(seconds.values())}

    def settle(self) -> None:
        """Wait until all groups that were begun are in the queue."""
        for each in self.in_flight.values():
            each.result()

    def catch_up(self) -> None:
        """Have the engines use the newest weights, for a validation. The groups that were begun come first."""
        self.settle()
        if self.new_weights is not None:
            weights, self.new_weights = self.new_weights, None
            self.loaded = self.work.submit(lambda: self.rollout.load(*weights)).result()

    def lost(self, rows: BatchMeta) -> list[str]:
        """The keys among these rows that belong to no step in flight."""
        known = self.engines.includes
        return [key for key, tags in zip(rows.keys, rows.tags, strict=True) if not known(tags.get("uid", key))]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> list[SavedStep]:
        """The groups in flight, once all of them are in the queue."""
        self.settle()
        sampled = {step: each.result() for step, each in self.in_flight.items()}
        return [
            {"step": step, "keys": list(batch.keys), "metrics": metrics} for step, (batch, metrics) in sampled.items()
        ]

    def restore(self, saved: Sequence[Mapping[str, Any]], step: int, queue: Queue) -> None:
        """Take in the groups that the checkpoint of `step` had in flight; their rows are in the queue again."""
        rows = queue.list(self.rollout.assignment.partition)
        self.begun = step
        for each in saved:
            self.begun += 1
            if each["step"] != self.begun or not set(each["keys"]) <= set(rows.keys):
                raise CheckpointError(f"the checkpoint's groups of step {self.begun} are missing, or not complete")
            batch = rows.select(each["keys"])
            self.engines.add(self.begun, (tags["uid"] for tags in batch.tags))
            done: Future[Sampled] = Future()
            done.set_result((batch, dict(each["metrics"])))
            self.in_flight[self.begun] = done
        if lost := self.lost(rows):
            raise CheckpointError(f"the checkpoint's queue has {len(lost)} rows of no step, such as {lost[0]}")


def versions_behind(batch: BatchMeta, version: int) -> Metrics:
    """How many versions of the weights lie between those that sampled a row and those that are trained now."""
    return spread("training/off_policy/versions_behind", [version - tags["weight_version"] for tags in batch.tags])
