"""Roles that share GPUs take turns on them: one that is about to compute makes the others leave first.

Worker groups and the engine pool each hold a `Turn` and call `take` before they compute, so that a step, a validation
and a checkpoint need not know who is where. Roles with devices of their own have no neighbours and never leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tqppo.devices.memory import MemoryLedger
from tqppo.devices.placement import Placement

WHOLE = frozenset({"weights", "cache"})  # what an engine holds when it is awake


class TurnTaker(Protocol):
    """A role that takes turns."""

    def rest(self) -> None:
        """Leave the devices; what is needed again goes to host memory."""

    def resume(self) -> None:
        """Return to the devices after a rest."""

    def held_bytes(self) -> int:
        """Device memory of the process that holds most."""


@dataclass
class DeviceTurns:
    """Who is on the devices. Without a ledger, memory is not counted."""

    placement: Placement
    ledger: MemoryLedger | None = None
    roles: dict[str, TurnTaker] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)

    def join(self, role: str, taker: TurnTaker) -> None:
        """Count a role that has started, and therefore is on its devices."""
        self.roles[role] = taker
        self.present.add(role)

    def make_room(self, role: str) -> None:
        """Have every other role leave that uses any of this role's devices."""
        neighbours = self.placement.neighbours(role)
        for other, taker in self.roles.items():
            if other in neighbours and other in self.present:
                taker.rest()
                self.present.remove(other)
                self.count(other)

    def take(self, role: str) -> None:
        self.make_room(role)
        if role in self.roles and role not in self.present:
            self.roles[role].resume()
            self.present.add(role)
        self.count(role)

    def count(self, role: str) -> None:
        """Write down what a role holds now; more than its devices have is an error."""
        if self.ledger is not None and role in self.roles:
            self.ledger.write(role, self.roles[role].held_bytes())


@dataclass(frozen=True)
class Turn:
    """One role's handle. Without `turns` the role is alone on its devices."""

    role: str = ""
    turns: DeviceTurns | None = None

    def take(self) -> None:
        """Call before computing: the role is on its devices, and no other is."""
        if self.turns is not None:
            self.turns.take(self.role)

    def count(self) -> None:
        """Call when the role holds more or less than before."""
        if self.turns is not None:
            self.turns.count(self.role)


class SleepingEngines(Protocol):
    """What an engine pool does for `SharedEngines`; engines are awake as a whole when they have started."""

    def sleep(self) -> None: ...
    def wake(self, *, cache: bool) -> None: ...
    def held_bytes(self) -> int: ...


@dataclass
class SharedEngines:
    """Engines that share GPUs: they sleep while another role has its turn, and wake as far as their next call needs.

    New weights are loaded before the cache returns, because the cache takes most of the memory.
    """

    engines: SleepingEngines
    turn: Turn = field(default_factory=Turn)
    awake: frozenset[str] = WHOLE

    @property
    def is_wholly_awake(self) -> bool:
        return self.awake == WHOLE

    def be_awake(self, *, cache: bool = True) -> None:
        """Call before the engines compute, or with `cache=False` before they load weights."""
        self.turn.take()
        wanted = WHOLE if cache else frozenset({"weights"})
        if not wanted <= self.awake:
            self.engines.wake(cache=cache)
            self.awake |= wanted
            self.turn.count()

    def rest(self) -> None:
        self.engines.sleep()
        self.awake = frozenset()

    def resume(self) -> None:
        """Nothing: `be_awake` wakes what is needed."""

    def held_bytes(self) -> int:
        return self.engines.held_bytes()
