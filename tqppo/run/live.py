"""A run once it is built, and what the loop asks of it: state, validation, measurements. `build` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqppo.data.prompts import Prompt, Sampler
from tqppo.errors import CheckpointError, OutOfSpace
from tqppo.metrics import validation
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.teachers.pool import TeacherPool
from tqppo.space import Digest
from tqppo.trainers.ahead import RolloutAhead
from tqppo.trainers.side_by_side import Clock
from tqppo.trainers.stages import Stages, Trainer
from tqppo.workers.actor import Actor
from tqppo.workers.compute.learner import Learner
from tqppo.workers.compute.saving import SavedPart
from tqppo.workers.critic import Critic
from tqppo.workers.process.group import Group


class Validator:
    """Held-out prompts, sampled and greedy; the same random numbers every time, so that steps compare."""

    def __init__(self, pool: RolloutPool, queue: Queue, clock: Clock, prompts: list[Prompt], task: Assignment) -> None:
        self.pool = pool
        self.queue = queue
        self.clock = clock
        self.prompts = prompts
        self.task = task
        self.example = ""  # a prompt, the model's likeliest answer and its reward, of the last validation

    def run(self) -> Metrics:
        if not self.prompts:
            return {}
        with self.clock.time("testing"):
            self.pool.generate(list(enumerate(self.prompts)), self.task)
            found = self.queue.list(self.task.partition)
            self.queue.clear(found)
            tags = found.in_order().tags
            last = [self._answer(each) for each in tags if each.get("last")]
            answers = validation.figures(last)
            self.example = self._example(last)
            failed = sum(each.get("failed_sessions", 0) for each in found.tags)
            return answers | validation.reverse_kl(tags) | {"val-aux/failed_sessions": float(failed)}

    def _example(self, answers: list[validation.Answer]) -> str:
        texts = {prompt.uid: prompt.text for prompt in self.prompts}
        greedy = next((each for each in answers if each.is_greedy and each.prompt in texts), None)
        return "" if greedy is None else f"{texts[greedy.prompt]!r} → {greedy.prediction!r}, reward {greedy.score:g}"

    def _answer(self, tags: Any) -> validation.Answer:
        return validation.Answer(
            prompt=tags["uid"],
            source=tags["source"],
            score=tags["reward"],
            metrics=tags.get("extra", {}),
            prediction=tags["answer"],
            is_greedy=tags["session"] == self.task.group_size,
        )


def _files_of(role: str, saved: Sequence[SavedPart]) -> dict[str, Digest]:
    """The files of a role's ranks by their names in the checkpoint. Raises `OutOfSpace` if a rank found no room."""
    for part in saved:
        if part.problem:
            raise OutOfSpace(part.problem)
    return {f"{role}/{name}": digest for part in saved for name, digest in part.files.items()}


@dataclass(frozen=True, slots=True)
class SavingRanks:
    """The ranks of each role that write their parts while the run goes on."""

    roles: Mapping[str, Group[Learner]]

    def written(self, wait_s: float) -> dict[str, Digest] | None:
        """What all ranks have written; None if one of them still writes after `wait_s`."""
        found = {role: group.ask_each(Learner.saved, wait_s) for role, group in self.roles.items()}
        parts = {role: [part for part in saved if part is not None] for role, saved in found.items()}
        if any(len(parts[role]) < len(saved) for role, saved in found.items()):
            return None
        return {name: digest for role, saved in parts.items() for name, digest in _files_of(role, saved).items()}


def _made(folder: Path) -> str:
    """A new folder, made by the driver: on a full disk that is an error here, and not of a worker, which would end."""
    folder.mkdir(parents=True)
    return str(folder.resolve())


@dataclass
class LiveRun:
    """Everything of a run that lives while it trains."""

    queue: Queue
    actor: Group[Actor]
    critic: Group[Critic] | None
    stages: Stages
    clock: Clock
    trainer: Trainer
    sampler: Sampler
    validator: Validator
    teachers: TeacherPool | None = None

    @property
    def ahead(self) -> RolloutAhead | None:
        """The rollout stage, if it samples ahead of training."""
        rollout = self.stages.rollout
        return rollout if isinstance(rollout, RolloutAhead) else None

    def save(self, folder: Path) -> dict[str, Digest]:
        """Write everything but the driver's own state into a checkpoint's folder; returns what the ranks wrote."""
        written: dict[str, Digest] = {}
        for role, group in self._learners().items():
            written |= _files_of(role, group.call_each(Learner.try_save, _made(folder / role)))
        self.queue.snapshot(folder / "queue")
        return written

    def begin_save(self, folder: Path) -> SavingRanks:
        """Like `save`, but the ranks only copy their state before this returns, and write it while the run goes on."""
        self.queue.snapshot(folder / "queue")
        folders = {role: _made(folder / role) for role in self._learners()}
        for role, group in self._learners().items():  # last: what has begun to write is always waited for
            group.call_each(Learner.begin_save, folders[role])
        return SavingRanks(self._learners())

    def _learners(self) -> dict[str, Group[Learner]]:
        """The roles that learn, by their names in a checkpoint."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}

    def checkpoint_bytes(self) -> int:
        """What the learners' weights and optimizer states take on disk."""
        return sum(group.call(Learner.checkpoint_bytes) for group in self._learners().values())

    def load(self, folder: Path, driver_state: dict[str, Any], step: int) -> None:
        """Restore everything as it was when step `step` ended."""
        if self.teachers is not None:
            self.teachers.check_state(driver_state.get("teachers", {}))
        for role, group in self._learners().items():
            group.call(Learner.load, str((folder / role).resolve()))
        self.queue.restore(folder / "queue")
        self._restore_driver(driver_state, step)
        version = step if step > self.stages.critic_only_steps else 0
        self.stages.rollout.load_weights(self.stages.actor.publish(version))
        self.clock.take()

    def _restore_driver(self, state: dict[str, Any], step: int) -> None:
        advantages = self.stages.advantages
        try:
            self.sampler.restore(state["data"])
            if self.ahead is not None:
                self.ahead.restore(state["ahead"], step, self.queue)
            advantages.controller = replace(advantages.controller, coef=float(state["kl_coef"]))
        except (KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"driver.json of the checkpoint is not what a run saves: {why}") from None

    def driver_state(self) -> dict[str, Any]:
        in_flight = {} if self.ahead is None else {"ahead": self.ahead.state()}  # first: sampling draws prompts
        state = {"data": self.sampler.state(), "kl_coef": self.stages.advantages.controller.coef, **in_flight}
        return state if self.teachers is None else {**state, "teachers": self.teachers.state()}

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        self.actor.call(Actor.export, str(folder.resolve()))

    def validate(self) -> Metrics:
        if self.ahead is not None:
            self.ahead.catch_up()
        return self.validator.run() | self.clock.take()

    def leftovers(self) -> list[str]:
        """Keys in the queue that belong to no step in flight: none, after a step and after a validation."""
        train, validation = self.queue.list(), self.queue.list(self.validator.task.partition)
        return [*(train.keys if self.ahead is None else self.ahead.lost(train)), *validation.keys]

    def measure(self, metrics: Metrics, seconds: float) -> Metrics:
        """The step's metrics with its timings: `seconds` of wall clock, of which each stage took a part."""
        return metrics | timings(self.clock.take(), seconds, metrics["perf/total_num_tokens"])


def timings(stages: Metrics, seconds: float, num_tokens: float) -> Metrics:
    """Where a step's time went. What no stage accounts for is `timing_s/other`."""
    return stages | {
        "timing_s/other": max(0.0, seconds - sum(stages.values())),
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / seconds if seconds else 0.0,
    }
