"""A run in one process: every role is an object of the command's own process, and no Ray is started.

Imported only to train, with `cluster.in_process`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tqppo.processes.lifeline import Watcher
from tqppo.processes.local import LocalLauncher
from tqppo.weights import location
from tqppo.workers.process.torch_state import TorchState


@contextmanager
def one_process(threads: int) -> Iterator[LocalLauncher]:
    """What launches the roles. Torch computes with this many threads meanwhile, as it does in a process of a role.

    Published weights do not outlive this process, however it ends.
    """
    watcher = Watcher(location.patterns())
    launcher = LocalLauncher(TorchState)
    try:
        with TorchState():
            torch.set_num_threads(threads)
            yield launcher
    finally:
        launcher.close()
        watcher.dismiss()
