"""Who leaves a device before whom, and what a fake device says when too much is on it."""

from __future__ import annotations

import pytest

from tqppo.devices.memory import MemoryLedger, out_of_memory
from tqppo.devices.placement import Device, Placement
from tqppo.devices.turns import DeviceTurns, Turn
from tqppo.errors import OutOfDeviceMemory

SHARED = Placement((2,), {role: ((Device(0, 0),), (Device(0, 1),)) for role in ("actor", "reference", "rollout")})
APART = Placement((2,), {"actor": ((Device(0, 0),),), "rollout": ((Device(0, 1),),)})

APART_BUT_ONE = Placement((2,), {"actor": ((Device(0, 0),),), "rollout": ((Device(0, 0), Device(0, 1)),)})


class Recorded:
    """A role that writes down what it is asked, and holds ten bytes while it is there."""

    def __init__(self, role: str, log: list[str], size: int = 10) -> None:
        self.role, self.log, self.size, self.is_away = role, log, size, False

    def rest(self) -> None:
        self.log.append(f"{self.role} rests")
        self.is_away = True

    def resume(self) -> None:
        self.log.append(f"{self.role} resumes")
        self.is_away = False

    def held_bytes(self) -> int:
        return 0 if self.is_away else self.size


def turns_of(placement: Placement, log: list[str], limit: int = 0, size: int = 10) -> DeviceTurns:
    turns = DeviceTurns(placement, MemoryLedger(placement, limit) if limit else None)
    for role in placement.roles:
        turns.join(role, Recorded(role, log, size))
    return turns


def test_a_role_that_computes_makes_all_others_on_its_devices_leave_first() -> None:
    log: list[str] = []
    turns = turns_of(SHARED, log)
    turns.take("rollout")
    turns.take("actor")
    turns.take("actor")
    turns.take("reference")
    assert log == [
        *("actor rests", "reference rests"),
        *("rollout rests", "actor resumes"),
        *("actor rests", "reference resumes"),
    ]


def test_without_shared_devices_nothing_leaves() -> None:
    log: list[str] = []
    turns = turns_of(APART, log)
    for role in ("rollout", "actor", "rollout"):
        Turn(role, turns).take()
    Turn().take()
    assert log == []


class Stuck(Recorded):
    """A role that cannot leave the first time."""

    def rest(self) -> None:
        super().rest()
        if self.log.count(f"{self.role} rests") == 1:
            raise RuntimeError("not now")


def test_a_role_that_could_not_leave_is_asked_again() -> None:
    log: list[str] = []
    turns = DeviceTurns(APART_BUT_ONE)
    turns.join("actor", Stuck("actor", log))
    turns.join("rollout", Recorded("rollout", log))
    with pytest.raises(RuntimeError):
        turns.take("rollout")
    turns.take("rollout")
    assert log == ["actor rests", "actor rests"]
    assert turns.present == {"rollout"}


def test_one_role_at_a_time_fits_where_two_do_not() -> None:
    log: list[str] = []
    turns = turns_of(SHARED, log, limit=15)
    turns.make_room("rollout")
    for role in ("rollout", "actor", "reference", "actor", "rollout"):
        turns.take(role)
    assert turns.ledger is not None
    assert turns.ledger.most == {Device(0, 0): 10, Device(0, 1): 10}


def test_a_full_device_is_named_with_what_is_on_it() -> None:
    placement = Placement((1,), {"actor": ((Device(0, 0),),), "rollout": ((Device(0, 0),),)})
    ledger = MemoryLedger(placement, 80 * 2**30)
    ledger.write("actor", 50 * 2**30)
    with pytest.raises(OutOfDeviceMemory) as error:
        ledger.write("rollout", 40 * 2**30)
    message = str(error.value)
    assert message.startswith("GPU 0 of node 0 has no room: actor 50.0 GiB + rollout 40.0 GiB = 90.0 GiB of 80.0 GiB\n")
    assert message.splitlines()[1] == str(out_of_memory("x", "y")).splitlines()[1]
