"""Stages of a step that do not need each other, run at the same time; and the clock that shares out their time.

`dataflow` says what a stage reads and writes. No stage of one call may read what another of it writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

from tqppo.protocols import Metrics
from tqppo.queue.meta import BatchMeta

T = TypeVar("T")


class Clock:
    """Seconds per stage of the current step. While several run, each gets an equal share of the time that passes, so
    that the seconds of all stages add up to the step's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._shared_until = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        with self._lock:
            self._share()
            self.seconds.setdefault(stage, 0.0)
            self._running.append(stage)
        try:
            yield
        finally:
            with self._lock:
                self._share()
                self._running.remove(stage)

    def _share(self) -> None:
        """Give the time since the last change to the stages that ran in it."""
        now = perf_counter()
        for stage in self._running:
            self.seconds[stage] += (now - self._shared_until) / len(self._running)
        self._shared_until = now

    def take(self) -> Metrics:
        """The seconds since the last call, as metrics."""
        seconds, self.seconds = self.seconds, {}
        return {f"timing_s/{stage}": value for stage, value in seconds.items()}


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Runs stages that do not need each other. `at_once`: each role has processes and devices of its own, so that they
    compute at the same time; otherwise one after the other, with the same results."""

    at_once: bool

    def columns(self, *stages: Callable[[], BatchMeta]) -> BatchMeta:
        """The batch with the columns of all stages, which were given the same one."""
        first, *others = self._results(stages)
        return first.with_columns(*(name for each in others for name in each.columns))

    def updates(self, *stages: Callable[[], Metrics]) -> Metrics:
        """The metrics of all stages."""
        return {name: value for metrics in self._results(stages) for name, value in metrics.items()}

    def _results(self, stages: Sequence[Callable[[], T]]) -> list[T]:
        """All results, or the first failure as soon as it happens."""
        if not self.at_once:
            return [stage() for stage in stages]
        calls = [_begun(partial(copy_context().run, stage)) for stage in stages]  # so that waits end as they do here
        ended, _ = futures.wait(calls, return_when=futures.FIRST_EXCEPTION)
        for call in calls:
            if call in ended:
                call.result()
        return [call.result() for call in calls]


def _begun(work: Callable[[], T]) -> Future[T]:
    """Do the work on a thread that does not hold up the end of the process: after a failure the run ends the processes
    that the other stages wait for, but a Ray that is lost may keep them waiting."""
    done: Future[T] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            done.set_exception(error)

    threading.Thread(target=do, name="tqppo-stage", daemon=True).start()
    return done
