"""A run in one process: every role is an object of the command's own process, and no Ray is started.

Imported only to train, with `cluster.in_process`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tqppo.processes.local import LocalLauncher
from tqppo.run.cluster import guard
from tqppo.workers.process.torch_state import TorchState

LIBRARIES = ("torch", "transformers")
LIBRARIES_LOG = "libraries.log"


@contextmanager
def libraries_log_to(path: Path) -> Iterator[None]:
    """Write what torch and transformers log into a file, as it would be in the log of a role's own process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, delay=True)
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    try:
        for logger in loggers:
            logger.handlers, logger.propagate = [file], False
        yield
    finally:
        for logger, handlers, propagates in before:
            logger.handlers, logger.propagate = handlers, propagates
        file.close()


@contextmanager
def one_process(threads: int, logs: Path) -> Iterator[LocalLauncher]:
    """What launches the roles. Torch computes with this many threads meanwhile, as it does in a process of a role.

    Published weights and the queue's rows do not outlive this process, however it ends.
    """
    watcher = guard()
    launcher = LocalLauncher(TorchState)
    try:
        with TorchState(), libraries_log_to(logs / LIBRARIES_LOG):
            torch.set_num_threads(threads)
            yield launcher
    finally:
        launcher.close()
        watcher.close()
