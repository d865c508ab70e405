"""A function that runs once in a Ray process of its own, watched while it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import ray

from tqppo.processes.actor_watch import ActorWatch
from tqppo.processes.ray_calls import call, kill, results

P = ParamSpec("P")
R = TypeVar("R")


class Job:
    """The process. A Ray actor, because that is what can be watched and ended."""

    def run(self, function: Callable[P, R], /, *arguments: P.args, **named: P.kwargs) -> R:
        return function(*arguments, **named)


def run_job(options: Mapping[str, object], timeout_s: float, what: str, work: Callable[[], R]) -> R:
    """Return what `work` returns in a process with these options of Ray, or raise what it raises.

    Raises DeadlineExceeded after `timeout_s`, and WorkerError if the process dies or stands still.
    """
    job = ray.remote(Job).options(**options, max_restarts=0).remote()
    try:
        return results([call(job, Job.run, work)], timeout_s, what, watch=ActorWatch({"its process": job}))[0]
    finally:
        kill(job)
