"""Every 7B preset on fake GPUs: `python fake_cluster.py NODES`, with 8 GPUs each."""

from __future__ import annotations

import sys
import time

import ray

from tqppo.config.compile import compile_config
from tqppo.config.placement import placement_of
from tqppo.config.read.presets import list_presets
from tqppo.config.sections import Config
from tqppo.placement import Placement
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


def presets(nodes: int) -> list[Config]:
    """The presets with GPUs that fit; on several nodes also those that use all of them."""
    names = [each.name for each in list_presets({}) if not each.name.startswith("base-")]
    drafts = [compile_config(name, environ={}).draft for name in names]
    found = [draft for draft in drafts if 0 < sum(placement_of(draft).gpus) <= 8 * nodes]
    if nodes == 1:
        return found
    wide = [
        "cluster.nodes=4",
        "actor.ranks=32",
        "reference.ranks=32",
        "rollout.replicas=8",
        "rollout.tensor_parallel=4",
    ]
    return [*found, compile_config("grpo-7b", [], wide, {}).draft]


def check(placement: Placement, seating: Seating) -> None:
    for role, seats in seating.seats.items():
        planned = placement.roles[role]
        found = [(seat.strategy.placement_group.id, index) for seat in seats for index in seat.devices]
        assert len(set(found)) == len(found), f"{role} has a device twice: {found}"
        assert [len(seat.devices) for seat in seats] == [len(devices) for devices in planned]
        for seat, devices in zip(seats, planned, strict=True):
            assert [int(index) for index in seat.devices] == [device.index for device in devices]
    sitters = {
        (role, number): Sitter.options(**seat.options()).remote()
        for role, seats in seating.seats.items()
        for number, seat in enumerate(seats)
    }
    machines: dict[int, set[str]] = {}
    for (role, number), sitter in sitters.items():
        machine, devices = ray.get(sitter.where.remote(), timeout=200)
        planned = placement.roles[role][number]
        machines.setdefault(planned[0].node, set()).add(machine)
        assert devices == [str(planned[0].index)], f"{role} {number} is on {devices}, not {planned}"
    assert all(len(found) == 1 for found in machines.values()), f"a node is spread over machines: {machines}"
    for sitter in sitters.values():
        ray.kill(sitter)


def main() -> None:
    nodes = int(sys.argv[1])
    start(nodes)
    for config in presets(nodes):
        began = time.monotonic()
        seating = take_seats(config)
        print(config.mode, placement_of(config).gpus, f"reserved in {time.monotonic() - began:.1f} s", flush=True)
        # Starting a process for each seat takes long on few cores: one preset shows what Ray does with seats.
        if (config.mode == "grpo" and config is presets(nodes)[-1]) or (nodes == 1 and config.mode == "ppo"):
            check(placement_of(config), seating)
        seating.close()
    print("placed")


if __name__ == "__main__":
    main()
