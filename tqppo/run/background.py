"""Checkpoints that are written while the run goes on: one at a time, from copies that the ranks make.

`Loop` begins one, looks after every step whether all parts are written, and waits for it before it begins the next or
ends. It becomes a checkpoint then, and not before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqppo.errors import DeadlineExceeded, TqppoError
from tqppo.run.checkpoint import CheckpointStore, Draft
from tqppo.space import Digest

TIMEOUT_S = 1800.0  # for the ranks to write what they have copied, once the run waits for them
LOOK_S = 1.0


class SavingParts(Protocol):
    """The parts of a checkpoint that the ranks are writing."""

    def written(self, wait_s: float) -> Mapping[str, Digest] | None:
        """The files of all ranks, or None if one of them still writes after `wait_s`. `OutOfSpace` if there is no room
        for one."""


@dataclass
class BackgroundSave:
    """The checkpoint under way, if there is one. Its errors are raised by the call that meets them, and end it."""

    store: CheckpointStore
    begin_parts: Callable[[Path], SavingParts]  # returns when the state is copied
    announce: Callable[[str], AbstractContextManager[object]] = nullcontext
    timeout_s: float = TIMEOUT_S
    under_way: tuple[Draft, SavingParts] | None = None

    @property
    def step(self) -> int:
        """The step of the checkpoint under way; 0 without one."""
        return self.under_way[0].step if self.under_way else 0

    def begin(self, step: int, driver_state: Mapping[str, Any], *, num_bytes: int) -> None:
        """Copy the state of this step and have it written."""
        assert self.under_way is None, f"the checkpoint of step {self.step} is still being written"
        draft = self.store.begin(step, driver_state, num_bytes=num_bytes)
        with self.store.filling(draft):
            self.under_way = draft, self.begin_parts(draft.folder)

    def look(self, wait_s: float = 0.0) -> bool:
        """Complete the checkpoint under way if all of it is written. Returns whether none is left."""
        if self.under_way is None:
            return True
        draft, parts = self.under_way
        try:
            with self.store.filling(draft):
                written = parts.written(wait_s)
        except TqppoError:
            self.under_way = None
            raise
        if written is None:
            return False
        self.under_way = None
        self.store.complete(draft, written)
        return True

    def finish(self) -> None:
        """Wait for the checkpoint under way, but not for ever: then it is given up with `DeadlineExceeded`."""
        if self.look():
            return
        step, deadline = self.step, time.monotonic() + self.timeout_s
        with self.announce(f"writing the checkpoint of step {step}"):
            while not self.look(LOOK_S):
                if time.monotonic() >= deadline:
                    self.under_way = None
                    raise DeadlineExceeded(
                        f"the checkpoint of step {step} was not written within {self.timeout_s:g} s: the disk of "
                        f"{self.store.folder} may be slow or stuck. Earlier checkpoints are as they were"
                    )
