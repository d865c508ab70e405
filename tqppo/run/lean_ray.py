"""A private Ray without the processes that a run has no use for, with workers from the run's fork server, on loopback.

Left out are the dashboard's server, the autoscaler's monitor and the monitor of logs, each an interpreter with Ray in
it. Ray has no settings for that, only parameters of its own functions. Ray listens on every interface unless it
believes that this machine is no part of a cluster, which is so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tqppo.processes import forked_worker
from tqppo.processes.fork_server import has_server


@contextmanager
def lean_ray() -> Iterator[None]:
    """Have a Ray that is started within this context start fewer processes, workers quickly, and listen on loopback."""
    from ray._private import node, parameter, ray_constants, utils

    options: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    if has_server():
        options["worker_path"] = os.path.abspath(forked_worker.__file__)
    with ExitStack() as stack:
        stack.enter_context(_replaced(parameter, "RayParams", partial(parameter.RayParams, **options)))
        stack.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
        stack.enter_context(_replaced(node.Node, "start_api_server", _not_started))
        stack.enter_context(_replaced(utils, "get_dashboard_dependency_error", _not_wanted))
        yield


@contextmanager
def _replaced(place: object, name: str, value: object) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _not_started(node: object, **options: object) -> None:
    """Stands in for the start of the dashboard's server."""


def _not_wanted() -> ImportError:
    """Stands in for Ray's look at the dashboard's dependencies, which imports them; its agent then does without."""
    return ImportError("the dashboard is not wanted")
