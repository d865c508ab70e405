"""Where Ray puts one process and what it reserves there. `run` decides; worker groups and engine pools take a seat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import SchedulingStrategyT


class ActorOptions(TypedDict):
    """Arguments of Ray's `options` for an actor."""

    num_cpus: float
    num_gpus: float
    scheduling_strategy: SchedulingStrategyT


@dataclass(frozen=True, slots=True)
class Seat:
    """One process: what Ray counts for it, on which node it runs, and which of the node's GPUs it uses."""

    cpus: float = 1.0
    gpus: float = 0.0  # roles that take turns on a device count for a fraction each, so that all fit at once
    devices: tuple[str, ...] = ()  # as CUDA numbers them on the node; an engine may have several
    strategy: SchedulingStrategyT = "DEFAULT"
    has_fake_devices: bool = False  # see `fake_gpus`: the process computes on the CPU

    @property
    def compute_device(self) -> str:
        """The kind of device that torch computes on."""
        return "cuda" if self.devices and not self.has_fake_devices else "cpu"

    @property
    def engine_devices(self) -> tuple[str, ...]:
        """The GPUs for an engine to use; none: it runs on the CPU."""
        return () if self.has_fake_devices else self.devices

    def options(self) -> ActorOptions:
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": self.strategy}


NO_CPU = Seat(cpus=0.0)  # of a process that computes so little that Ray need not count it
