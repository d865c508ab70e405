"""The training loop: steps, validation, checkpoints, metrics, signals. `start` builds the run and calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tqppo.errors import OutOfSpace, QueueError
from tqppo.protocols import Metrics
from tqppo.run.checkpoint import CheckpointStore, SaveParts
from tqppo.run.signals import StopRequest


@dataclass(frozen=True, slots=True)
class Schedule:
    """When things happen, in steps; 0 is never, except that the end always counts."""

    max_steps: int
    validate_every: int
    validate_before: bool
    save_every: int
    save_on_exit: bool
    saves_or_stops: bool = True  # False: the run goes on when a checkpoint does not fit on the disk

    def validates(self, step: int) -> bool:
        return step == self.max_steps or bool(self.validate_every and step % self.validate_every == 0)

    def saves(self, step: int) -> bool:
        return bool(self.save_every and step % self.save_every == 0)


@dataclass
class Loop:
    """One attempt at a run, from `start` (the step of the checkpoint, or 0) to the last step or a signal."""

    step: Callable[[int], Metrics]
    schedule: Schedule
    stop: StopRequest
    store: CheckpointStore
    log: Callable[[int, Metrics], None]  # durable when it returns
    validate: Callable[[], Metrics]
    measure: Callable[[Metrics, float], Metrics]  # adds timings and throughput, from the step's wall clock in seconds
    leftovers: Callable[[], list[str]]  # keys still in the queue
    save_parts: SaveParts
    driver_state: Callable[[], dict[str, Any]]
    export: Callable[[], None]
    checkpoint_bytes: Callable[[], int] = lambda: 0  # at least; what the learners' state takes on disk
    warn: Callable[[str], None] = lambda message: None

    def run(self, start: int) -> int:
        """The exit code: 0 when the last step is done, 130 or 143 after a signal."""
        if start >= self.schedule.max_steps:  # all but the export is done
            self.export()
            return 0
        if start == 0 and self.schedule.validate_before and not self.stop.number:
            self.log(0, self._validated(0))
        for step in range(start + 1, self.schedule.max_steps + 1):
            if self.stop.number:  # it may have come before the first step
                return self.stop.exit_code
            self._one(step)
        return 0

    def _one(self, step: int) -> None:
        began = perf_counter()
        metrics = self.step(step)
        seconds = perf_counter() - began
        self._check_leftovers(f"step {step}")
        metrics = self.measure(metrics, seconds)
        if self.schedule.validates(step):
            metrics |= self._validated(step)
        # The metrics of a step are on disk before its checkpoint is: a resumed run cuts them back to its
        # checkpoint, so that a kill between the two neither loses nor repeats a line.
        self.log(step, metrics)
        finished = step == self.schedule.max_steps
        leaving = finished or self.stop.number
        if self.schedule.saves(step) or (leaving and self.schedule.save_on_exit):
            self._save(step)
        if finished:  # after the checkpoint, which then outlives an export that fails
            self.export()

    def _validated(self, step: int) -> Metrics:
        metrics = self.validate()
        self._check_leftovers(f"the validation after step {step}")
        return metrics

    def _check_leftovers(self, what: str) -> None:
        if left := self.leftovers():
            raise QueueError(f"{what} left {len(left)} keys in the queue: {', '.join(left[:8])}")

    def _save(self, step: int) -> None:
        try:
            self.store.write(step, self.save_parts, self.driver_state(), num_bytes=self.checkpoint_bytes())
        except OutOfSpace as error:
            if self.schedule.saves_or_stops:
                raise OutOfSpace(f"the checkpoint of step {step} was not written: {error}") from error
            self.warn(f"the checkpoint of step {step} was not written, training goes on: {error}")
