"""Tells a process that stands still from one that is busy, by what the kernel says of its threads.

A live process of a run is never quite still: Ray's threads in it wake up several times a second, whatever the function
computes and whatever lock it holds. A process none of whose threads has run for `STILL_S` is stopped, frozen or stuck
in the kernel, and will not answer. Linux only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import NamedTuple

LOOK_S = 2.0  # between two looks at a process
STILL_S = 20.0
STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting in the kernel", "S": "asleep", "I": "idle"}


class Activity(NamedTuple):
    """What a process has done so far: nanoseconds that its threads ran, and their states."""

    ran_ns: int
    states: str

    @property
    def state(self) -> str:
        """The state that explains most, in words."""
        found = next((each for each in "tTD" if each in self.states), self.states[:1])
        return STATES.get(found, found)


def activity(pid: int) -> Activity | None:
    """The activity of a process on this node; None if it has ended."""
    ran_ns, states = 0, ""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                ran_ns += int(file.read().split()[0])
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                states += file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # a thread has ended since, which is activity; or the process has
        return Activity(time.monotonic_ns(), "R") if os.path.exists(f"/proc/{pid}") else None
    except ProcessLookupError:
        return None
    return None if set(states) <= set("ZX") else Activity(ran_ns, states)


@dataclass
class Stillness:
    """How long one process has stood still, added up over looks at it.

    A look counts for `2 × LOOK_S` at most: when the process that looks was suspended, nothing is known of the others.
    """

    still_s: float = 0.0
    last: Activity | None = None
    _at: float = field(default_factory=time.monotonic)

    def look(self, now: Activity | None) -> str:
        """Take in the process's activity; returns what it does instead of running, or nothing while it is well."""
        at = time.monotonic()
        passed, self._at = at - self._at, at
        is_still = now is not None and self.last is not None and "R" not in now.states and now == self.last
        self.still_s = self.still_s + min(passed, 2 * LOOK_S) if is_still else 0.0
        self.last = now
        if now is None or self.still_s < STILL_S:
            return ""
        return f"none of its threads has run for {self.still_s:.0f} s ({now.state})"
