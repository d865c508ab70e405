"""Placements on fake GPUs: `python fake_cluster.py NODES`, with 8 GPUs each; with several nodes every preset's."""

from __future__ import annotations

import os
import sys
import time

os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 - 32 processes would start that nothing uses

import ray

from tqppo.config.compile import compile_config
from tqppo.config.placement import placement_of
from tqppo.config.read.presets import list_presets
from tqppo.config.sections import Config
from tqppo.devices.placement import Placement
from tqppo.run.cluster import start_patiently
from tqppo.run.placement import Seating, take_seats


@ray.remote
class Sitter:
    """Says where Ray put it."""

    def where(self) -> tuple[str, list[str]]:
        return str(ray.get_runtime_context().get_node_id()), [str(each) for each in ray.get_gpu_ids()]


def start(nodes: int) -> None:
    if nodes == 1:
        start_patiently(lambda: ray.init(address="local", num_cpus=32, num_gpus=8, include_dashboard=False))
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 32, "num_gpus": 8})
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=32, num_gpus=8, wait=False)
    cluster.wait_for_nodes(timeout=120)
    start_patiently(lambda: ray.init(address=cluster.address))


def configs(nodes: int) -> list[Config]:
    """One preset with GPUs for each placement that fits, and last one with engines of several GPUs on every node."""
    names = [each.name for each in list_presets({}) if not each.name.startswith("base-")]
    drafts = [compile_config(name, environ={}).draft for name in names]
    fits = 8 * nodes if nodes > 1 else 0  # on one node the last is enough: each takes ten seconds
    found = {repr(placement_of(draft)): draft for draft in drafts if 0 < sum(placement_of(draft).gpus) <= fits}
    sizes = [f"cluster.nodes={nodes}", f"actor.ranks={8 * nodes}", f"reference.ranks={8 * nodes}"]
    engines = [f"rollout.replicas={4 * nodes}", "rollout.tensor_parallel=2"]
    return [*found.values(), compile_config("grpo-7b", [], [*sizes, *engines], {}).draft]


def check_seats(placement: Placement, seating: Seating) -> None:
    """Devices are distinct within a role, and those of a process are the ones that the placement says."""
    for role, seats in seating.seats.items():
        found = [(seat.strategy.placement_group.id, index) for seat in seats for index in seat.devices]
        assert len(set(found)) == len(found), f"{role} has a device twice: {found}"
        for seat, devices in zip(seats, placement.roles[role], strict=True):
            assert [int(index) for index in seat.devices] == [device.index for device in devices]


def check_processes(placement: Placement, seating: Seating) -> None:
    """Processes that take these seats are on the GPUs that the placement says; four of each role, to save time."""
    machines: dict[int, set[str]] = {}
    for role, seats in seating.seats.items():
        numbers = range(0, len(seats), max(1, len(seats) // 4))
        sitters = {number: Sitter.options(**seats[number].options()).remote() for number in numbers}
        for number, sitter in sitters.items():
            machine, devices = ray.get(sitter.where.remote(), timeout=200)
            planned = placement.roles[role][number]
            machines.setdefault(planned[0].node, set()).add(machine)
            assert devices == [str(planned[0].index)], f"{role} {number} is on {devices}, not {planned}"
            ray.kill(sitter)
    assert len(machines) == len(placement.gpus), machines
    assert all(len(found) == 1 for found in machines.values()), f"a node is spread over machines: {machines}"


def main() -> None:
    nodes = int(sys.argv[1])
    start(nodes)
    for config in configs(nodes):
        began, placement = time.monotonic(), placement_of(config)
        seating = take_seats(config)
        print(config.mode, placement.gpus, f"reserved in {time.monotonic() - began:.1f} s", flush=True)
        check_seats(placement, seating)
        seating.close()
    check_processes(placement, take_seats(config))
    print("placed")


if __name__ == "__main__":
    main()
