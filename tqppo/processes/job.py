"""A function that runs once in a process of its own, watched while it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tqppo.processes.hosting import Hosting, Launcher, results

P = ParamSpec("P")
R = TypeVar("R")


class Job:
    """The object of that process."""

    def run(self, function: Callable[P, R], /, *arguments: P.args, **named: P.kwargs) -> R:
        return function(*arguments, **named)


def run_job(launcher: Launcher, how: Hosting, timeout_s: float, what: str, work: Callable[[], R]) -> R:
    """Return what `work` returns in a process of its own, or raise what it raises.

    Raises DeadlineExceeded after `timeout_s`, and WorkerError if the process dies or stands still.
    """
    job = launcher.launch(how, Job)
    try:
        return results([job.call(Job.run, work)], timeout_s, what, watch=launcher.watch({"its process": job}))[0]
    finally:
        job.kill()
