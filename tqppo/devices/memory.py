"""Device memory that runs out: one message for GPUs and for fake ones, and the ledger of the fake ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqppo.devices.placement import Device, Placement
from tqppo.errors import OutOfDeviceMemory
from tqppo.units import size

ADVICE = (
    "lower micro_batch_tokens of the role, set its gradient_checkpointing, use more ranks, lower "
    "rollout.memory_fraction, or set cluster.colocate so that roles take turns; `tqppo validate-config` shows what "
    "each role needs"
)


def out_of_memory(where: str, found: str) -> OutOfDeviceMemory:
    return OutOfDeviceMemory(f"{where} has no room: {found}\n  {ADVICE}")


@dataclass
class MemoryLedger:
    """What every role holds on each of its devices. More than a device has is an error, as on a GPU."""

    placement: Placement
    memory_bytes: int  # of each device
    held: dict[str, int] = field(default_factory=dict)  # by role, on each of its devices
    most: dict[Device, int] = field(default_factory=dict)  # the largest sum so far

    def write(self, role: str, num_bytes: int) -> None:
        self.held[role] = num_bytes
        for device in self.placement.devices_of(role):
            self._check(device)

    def _check(self, device: Device) -> None:
        held = {role: self.held[role] for role in self.placement.on(device) if self.held.get(role)}
        total = sum(held.values())
        self.most[device] = max(total, self.most.get(device, 0))
        if total > self.memory_bytes:
            terms = " + ".join(f"{role} {size(num_bytes)}" for role, num_bytes in held.items())
            found = f"{terms} = {size(total)} of {size(self.memory_bytes)}"
            raise out_of_memory(f"GPU {device.index} of node {device.node}", found)
