"""A placement as a value: who shares a device with whom, and what is left over."""

from __future__ import annotations

from tqppo.devices.placement import Device, Placement
from tqppo.devices.seats import NO_CPU, Seat

ZERO, ONE, TWO = Device(0, 0), Device(0, 1), Device(1, 0)


def test_roles_on_one_device_are_neighbours_and_the_rest_is_idle() -> None:
    placement = Placement((2, 1), {"actor": ((ZERO,),), "rollout": ((ZERO, ONE),), "critic": ((ONE,),), "far": ((),)})
    assert placement.neighbours("rollout") == {"actor", "critic"}
    assert placement.neighbours("actor") == {"rollout"}
    assert placement.neighbours("far") == frozenset()
    assert placement.idle == [TWO]
    assert placement.most_roles_on_a_device == 2


def test_a_seat_says_where_to_compute_and_what_ray_reserves() -> None:
    seat = Seat(0.5, 0.25, ("2", "3"))
    assert (seat.compute_device, seat.engine_devices) == ("cuda", ("2", "3"))
    assert seat.options() == {"num_cpus": 0.5, "num_gpus": 0.25, "scheduling_strategy": "DEFAULT"}
    assert NO_CPU.compute_device == "cpu"


def test_on_fake_devices_everything_computes_on_the_cpu() -> None:
    seat = Seat(devices=("2",), has_fake_devices=True)
    assert (seat.compute_device, seat.engine_devices) == ("cpu", ())
