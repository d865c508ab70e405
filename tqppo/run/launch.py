"""What launches the processes of a run: Ray, or with `cluster.in_process` the command's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from tqppo.config import facts
from tqppo.config.sections import Config
from tqppo.devices.fake_gpus import fake_gpus
from tqppo.plugins import available
from tqppo.processes.fork_server import fork_server
from tqppo.processes.hosting import Launcher
from tqppo.run.cluster import Hooks, ray_cluster

IMPORTED_BY_RAY = ("requests", "jsonschema", "msgpack", "google.protobuf.descriptor_pool")  # half of what Ray takes
ShowStage = Callable[[str], AbstractContextManager[object]]  # shows the user what takes time


def launcher_of(config: Config, logs: Path, stack: ExitStack, stage: ShowStage, hooks: Hooks) -> Launcher:
    """Start what launches processes; closing `stack` ends it."""
    if not config.cluster.in_process:
        stack.enter_context(workers_ahead(config))
        with stage("starting Ray"):
            return stack.enter_context(_ray(config, logs, hooks))
    with stage("importing torch"):
        from tqppo.run.one_process import one_process

        import_module("tqppo.run.build")
    return stack.enter_context(one_process(config.run.threads or 1, logs))


@contextmanager
def workers_ahead(config: Config) -> Iterator[None]:
    """Import what the workers of the run's Ray need in a process of its own, while this one does other things.

    Only for a private Ray without GPUs: a process that has looked for GPUs must not be forked.
    """
    if config.cluster.in_process or config.cluster.address or (config.cluster.gpus_per_node and not fake_gpus()):
        yield
        return
    engine = available("rollout").get(config.rollout.backend)
    with fork_server(["tqppo.run.build", *([engine.module] if engine else []), *IMPORTED_BY_RAY]):
        yield


def _ray(config: Config, logs: Path, hooks: Hooks) -> AbstractContextManager[Launcher]:
    fake = fake_gpus()
    return ray_cluster(
        config.cluster.address,
        num_cpus=max(os.cpu_count() or 1, fake.count if fake else 0),  # a fake GPU has a core
        num_gpus=fake.count if fake else None,
        object_store_bytes=facts.storage_budget_bytes(config) if config.storage.backend == "ray" else 0,
        logs=logs,
        hooks=hooks,
    )
