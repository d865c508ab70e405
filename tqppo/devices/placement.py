"""Which process sits on which GPU: a plain value that the config decides, the plan shows and the run carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TEACHER = "teacher "  # begins the role's name of each teacher


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A GPU by the number of its node and its own number there. Ray decides which machine is which node."""

    node: int
    index: int


Seats = tuple[tuple[Device, ...], ...]  # the devices of each process of a role, in the order of ranks or replicas


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of every process. A process without a device, such as one that attaches to a server, has none.

    Nodes of the trainer come first, then those of the teachers' pool.
    """

    gpus: tuple[int, ...]  # of each node
    roles: Mapping[str, Seats]
    unplaced: Mapping[str, int] = field(default_factory=dict)  # processes of each role that found no device

    @property
    def devices(self) -> list[Device]:
        return [Device(node, index) for node, count in enumerate(self.gpus) for index in range(count)]

    @property
    def idle(self) -> list[Device]:
        """Devices that no process uses."""
        used = {device for seats in self.roles.values() for seat in seats for device in seat}
        return [device for device in self.devices if device not in used]

    def devices_of(self, role: str) -> list[Device]:
        return [device for seat in self.roles[role] for device in seat]

    def on(self, device: Device) -> list[str]:
        """The roles that use a device."""
        return [role for role in self.roles if device in self.devices_of(role)]

    def neighbours(self, role: str) -> frozenset[str]:
        """The other roles that use any of this role's devices, and must take turns with it."""
        return frozenset(other for device in self.devices_of(role) for other in self.on(device)) - {role}

    @property
    def most_roles_on_a_device(self) -> int:
        return max((len(self.on(device)) for device in self.devices), default=1) or 1
