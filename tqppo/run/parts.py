"""A run's parts once they are built: what the loop asks of them. Built by `assemble`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqppo.metrics import validation

if TYPE_CHECKING:
    from tqppo.data.prompts import Prompt, Sampler
    from tqppo.queue.client import Queue
    from tqppo.rollout.assignment import Assignment
    from tqppo.rollout.pool import RolloutPool
    from tqppo.trainers.grpo import GrpoTrainer
    from tqppo.trainers.ppo import PpoTrainer
    from tqppo.trainers.stages import Clock, Stages
    from tqppo.workers.process.group import WorkerGroup

Metrics = dict[str, float]
LEARNERS = ("actor", "critic")


class Validator:
    """Held-out prompts, sampled and greedy; the same random numbers every time, so that steps compare."""

    def __init__(self, pool: RolloutPool, queue: Queue, clock: Clock, prompts: list[Prompt], task: Assignment) -> None:
        self.pool = pool
        self.queue = queue
        self.clock = clock
        self.prompts = prompts
        self.task = task

    def run(self) -> Metrics:
        if not self.prompts:
            return {}
        with self.clock.time("testing"):
            self.pool.generate(list(enumerate(self.prompts)), self.task)
            found = self.queue.list(self.task.partition)
            self.queue.clear(found)
            rows = (tags for tags in found.in_order().tags if tags.get("last"))
            return validation.figures(self._answer(tags) for tags in rows)

    def _answer(self, tags: Any) -> validation.Answer:
        return validation.Answer(
            prompt=tags["uid"],
            source=tags["source"],
            score=tags["reward"],
            metrics=tags.get("extra", {}),
            prediction=tags["answer"],
            is_greedy=tags["session"] == self.task.group_size,
        )


@dataclass
class Parts:
    """Everything of a run that lives while it trains."""

    queue: Queue
    pool: RolloutPool
    groups: dict[str, WorkerGroup]  # by role: actor, and of critic, reference, reward_model what the run has
    stages: Stages
    trainer: GrpoTrainer | PpoTrainer
    sampler: Sampler
    validator: Validator

    def save(self, folder: Path) -> None:
        """All but the driver's own state, into a checkpoint's folder."""
        for role in LEARNERS:
            if role in self.groups:
                self.groups[role].save(str((folder / role).resolve()))
        self.queue.snapshot(folder / "queue")

    def load(self, folder: Path, driver_state: dict[str, Any], step: int) -> None:
        """Everything as it was when step `step` ended."""
        for role in LEARNERS:
            if role in self.groups:
                self.groups[role].load(str((folder / role).resolve()))
        self.queue.restore(folder / "queue")
        self.sampler.restore(driver_state["data"])
        advantages = self.stages.advantages
        advantages.controller = replace(advantages.controller, coef=driver_state["kl_coef"])
        self.stages.rollout.load_weights(self.groups["actor"].publish(step))
        self.stages.clock.take()

    def driver_state(self) -> dict[str, Any]:
        return {"data": self.sampler.state(), "kl_coef": self.stages.advantages.controller.coef}

    def validate(self) -> Metrics:
        return self.validator.run() | self.stages.clock.take()

    def leftovers(self) -> list[str]:
        """Keys still in the queue: none, after a step."""
        return list(self.queue.list().keys)

    def measure(self, metrics: Metrics) -> Metrics:
        """The step's metrics, with what the driver knows: timings, throughput, counts, the reward's extras."""
        stages = self.stages
        found = {**stages.advantages.metrics, **metrics, **stages.padding.metrics, **stages.rollout.metrics}
        timings, tokens = stages.clock.take(), stages.rollout.num_tokens
        seconds = sum(timings.values())
        found |= self.sampler.metrics() | timings
        found |= {"timing_s/step": seconds, "perf/time_per_step": seconds, "perf/total_num_tokens": float(tokens)}
        found["perf/throughput"] = tokens / seconds if seconds else 0.0
        return found
