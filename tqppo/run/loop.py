"""The training loop: steps, validation, checkpoints, metrics, signals. `start` builds the run and calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tqppo.errors import OutOfSpace, QueueError, TqppoError
from tqppo.protocols import Metrics
from tqppo.run.background import BackgroundSave
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
    background: BackgroundSave | None = None  # None: a step waits until its checkpoint is written

    def run(self, start: int) -> int:
        """The exit code: 0 when the last step is done, 130 or 143 after a signal."""
        with self._with_what_is_under_way():
            return self._steps(start)

    def _steps(self, start: int) -> int:
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
        leaving = finished or bool(self.stop.number)
        saves = self.schedule.saves(step) or (leaving and self.schedule.save_on_exit)
        self._look_at_saves(wait=saves or leaving)
        if saves:
            self._save(step, is_last=leaving)
        if finished:  # after the checkpoint, which then outlives an export that fails
            self.export()

    def _validated(self, step: int) -> Metrics:
        metrics = self.validate()
        self._check_leftovers(f"the validation after step {step}")
        return metrics

    def _check_leftovers(self, what: str) -> None:
        if left := self.leftovers():
            raise QueueError(f"{what} left {len(left)} keys in the queue: {', '.join(left[:8])}")

    def _save(self, step: int, *, is_last: bool) -> None:
        """Save this step; the last one at once, because nothing goes on meanwhile."""
        with self._fits(step):
            state, num_bytes = self.driver_state(), self.checkpoint_bytes()
            if self.background is None or is_last:
                self.store.write(step, self.save_parts, state, num_bytes=num_bytes)
            else:
                self.background.begin(step, state, num_bytes=num_bytes)

    def _look_at_saves(self, *, wait: bool) -> None:
        """Complete the checkpoint that is written in the background, if it is ready or is to be waited for."""
        if self.background is not None:
            with self._fits(self.background.step):
                if wait:
                    self.background.finish()
                else:
                    self.background.look()

    @contextmanager
    def _with_what_is_under_way(self) -> Iterator[None]:
        """Complete the checkpoint under way, too, when a step ends the run with an error."""
        try:
            yield
        except TqppoError as error:
            try:
                self._look_at_saves(wait=True)
            except TqppoError as other:  # the first error says why the run ends
                if other is not error:
                    self.warn(f"the checkpoint under way was not completed: {other}")
            raise

    @contextmanager
    def _fits(self, step: int) -> Iterator[None]:
        """End the run, or warn and go on, if the checkpoint of this step has no room on the disk."""
        try:
            yield
        except OutOfSpace as error:
            if self.schedule.saves_or_stops:
                raise OutOfSpace(f"the checkpoint of step {step} was not written: {error}") from error
            self.warn(f"the checkpoint of step {step} was not written, training goes on: {error}")
