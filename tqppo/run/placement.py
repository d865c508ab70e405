"""Carries a placement out on a Ray cluster: reserves its GPUs, finds out which they are, gives every process a seat.

Each node of the placement is one placement group with a bundle per GPU, all on one machine. Whether the cluster has
the resources is asked before any process starts, because Ray waits for ever for what no node has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tqppo.config import facts
from tqppo.config.placement import placement_of
from tqppo.config.sections import Config
from tqppo.devices.placement import TEACHER, Device, Placement
from tqppo.devices.seats import NO_CPU, Seat
from tqppo.errors import PreflightError
from tqppo.processes import ray_health

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import SchedulingStrategyT

RESERVE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ProcessReservation:
    """What Ray counts for one process. Roles that take turns count for a fraction each, so that all fit at once."""

    cpus: float
    gpus: float
    teacher_cpus: float
    teacher_gpus: float


def process_reservation(config: Config, placement: Placement) -> ProcessReservation:
    cluster, teachers = config.cluster, config.teachers if facts.has_teachers(config) else {}
    sharing = len(facts.roles(config)) if cluster.colocate else 1
    pool_has_gpus = bool(config.distillation.gpus_per_node)
    # Teachers without GPUs share the cores with all other roles: they score while the student samples.
    guests = 0 if pool_has_gpus or not cluster.colocate else sum(each.replicas for each in teachers.values())
    cpus = cluster.cpus_per_worker / (sharing + guests)
    return ProcessReservation(
        cpus=cpus,
        gpus=1.0 / placement.most_roles_on_a_device if cluster.gpus_per_node else 0.0,
        teacher_cpus=cpus if guests else cluster.cpus_per_worker,
        teacher_gpus=1.0 if pool_has_gpus else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Demand:
    """The CPUs that one role asks of Ray: a number of processes, and the share of each."""

    role: str
    processes: int
    cpus: float = 1.0


def demands(config: Config) -> list[Demand]:
    """What the processes without a GPU reserve, and for each GPU the processes that take turns on it."""
    placement = placement_of(config)
    reservation = process_reservation(config, placement)
    found = [Demand("GPUs", len(placement.devices), config.cluster.cpus_per_worker)] if placement.devices else []
    for role, seats in placement.roles.items():
        if count := sum(not seat for seat in seats):
            found.append(Demand(role, count, _cpus(config, reservation, role)))
    return found


def _cpus(config: Config, reservation: ProcessReservation, role: str) -> float:
    """The CPUs of one process; one that attaches to a server only passes tokens on."""
    if not role.startswith(TEACHER):
        return reservation.cpus
    return 0.0 if config.teachers[role.removeprefix(TEACHER)].endpoints else reservation.teacher_cpus


def check_resources(config: Config, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise `PreflightError` with the sums if the cluster, of which `nodes` are the resources, lacks CPUs or GPUs."""
    placement = placement_of(config)
    problems = [
        _too_few_nodes(config, len(nodes)),
        _too_few_cpus(demands(config), sum(node.get("CPU", 0.0) for node in nodes)),
        _too_few_gpus(placement, [int(node.get("GPU", 0.0)) for node in nodes]),
    ]
    if found := [problem for problem in problems if problem]:
        raise PreflightError("\n".join(found))


def _too_few_nodes(config: Config, count: int) -> str:
    if count >= config.cluster.nodes or config.cluster.gpus_per_node:
        return ""
    return f"cluster.nodes is {config.cluster.nodes}, and the cluster has {count}: join a larger one (cluster.address)"


def _too_few_cpus(found: Sequence[Demand], available: float) -> str:
    asked = [demand for demand in found if demand.cpus > 0]
    total = sum(demand.processes * demand.cpus for demand in asked)
    if total <= available + 1e-6:  # fractions rarely add up to exactly 1
        return ""
    terms = " + ".join(f"{demand.role} {demand.processes} × {demand.cpus:g}" for demand in asked)
    return (
        f"the plan needs {total:g} CPUs, the cluster has {available:g}: {terms} = {total:g}\n"
        "  lower cluster.cpus_per_worker, use fewer ranks or replicas, or join a larger cluster (cluster.address)"
    )


def _too_few_gpus(placement: Placement, found: Sequence[int]) -> str:
    """Every node of the placement needs its GPUs on one machine; a machine may hold several nodes."""
    free, missing = sorted(found), []
    for count in sorted((count for count in placement.gpus if count), reverse=True):
        machine = next((i for i, gpus in enumerate(free) if gpus >= count), None)
        if machine is None:
            missing.append(count)
        else:
            free[machine] -= count
    if not missing:
        return ""
    wanted = ", ".join(map(str, placement.gpus))
    has = ", ".join(str(gpus) for gpus in found) or "none"
    return (
        f"the plan needs nodes with {wanted} GPUs, the cluster's have {has}: no machine for {len(missing)} of them\n"
        "  lower cluster.nodes or cluster.gpus_per_node, use fewer ranks or replicas, or join a larger cluster "
        "(cluster.address)"
    )


def node_resources() -> list[Mapping[str, float]]:
    """What each live node of the cluster has."""
    import ray

    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    return [node["Resources"] for node in nodes() if node["Alive"]]


# -- seats -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bundle:
    """A reserved GPU: its place in a placement group, the machine and the number that CUDA gives it there."""

    strategy: SchedulingStrategyT
    machine: str
    cuda_index: str


@dataclass
class Seating:
    """The seat of every process on this cluster."""

    seats: Mapping[str, Sequence[Seat]]
    home: Seat = NO_CPU  # on the machine of the trainer's first GPU, for processes that read many columns
    num_unused: int = 0  # GPUs of the cluster that the plan does not use
    groups: list[PlacementGroup] = field(default_factory=list)

    def close(self) -> None:
        """Give the reserved GPUs back."""
        import ray

        for group in self.groups if not ray_health.lost() else ():
            ray.util.remove_placement_group(group)
        self.groups = []


def seats_without_devices(config: Config) -> Seating:
    """The seats of a run without GPUs, and without Ray."""
    return Seating(_seats(config, placement_of(config), {}, fake=False))


def take_seats(config: Config, *, fake: bool = False) -> Seating:
    """Reserve what the config's placement needs; closing the result gives it back. `fake`: GPUs that do not exist."""
    import ray

    from tqppo.processes.ray_calls import this_node

    placement = placement_of(config)
    resources: Callable[[], dict[str, float]] = ray.cluster_resources
    seating = Seating({}, num_unused=round(resources().get("GPU", 0.0)) - len(placement.devices))
    try:
        reserved = [_reserve_node(seating, count, config.cluster.cpus_per_worker) for count in placement.gpus]
        # Rank 0 sits on the driver's machine if that has GPUs: it writes what the driver reads.
        trainer, pool = reserved[: config.cluster.nodes], reserved[config.cluster.nodes :]
        trainer.sort(key=lambda found: (found[0].machine != this_node(), found[0].machine) if found else (False, ""))
        bundles = {
            Device(node, index): bundle
            for node, found in enumerate([*trainer, *pool])
            for index, bundle in enumerate(found)
        }
        seating.seats = _seats(config, placement, bundles, fake=fake)
    except BaseException:
        seating.close()
        raise
    if config.cluster.gpus_per_node:
        seating.home = replace(NO_CPU, strategy=_affinity(bundles[Device(0, 0)].machine))
    return seating


def _reserve_node(seating: Seating, count: int, cpus: float) -> list[Bundle]:
    """The GPUs of one node, of which `seating` keeps the placement group."""
    if not count:
        return []
    seating.groups.append(_reserve(count, cpus))
    return _bundles(seating.groups[-1], count)


def _reserve(count: int, cpus: float) -> PlacementGroup:
    from ray.util.placement_group import placement_group, remove_placement_group

    group: PlacementGroup = placement_group([{"GPU": 1.0, "CPU": cpus}] * count, strategy="STRICT_PACK")
    if not group.wait(RESERVE_TIMEOUT_S):
        remove_placement_group(group)
        raise PreflightError(
            f"no node of the cluster had {count} GPUs and {count * cpus:g} CPUs free within {RESERVE_TIMEOUT_S:g} s: "
            "another job may hold them (`ray status` shows the free ones)"
        )
    return group


def _bundles(group: PlacementGroup, count: int) -> list[Bundle]:
    """The GPUs of a placement group in CUDA's order. Ray tells only a process in a bundle which GPU that has."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from tqppo.processes.hosting import results
    from tqppo.processes.ray_launcher import RayCall

    look = ray.remote(num_cpus=0, num_gpus=1)(_look)
    found = []
    for index in range(count):  # one after the other, so that one process serves all
        strategy = PlacementGroupSchedulingStrategy(group, index)
        calls = [RayCall(look.options(scheduling_strategy=strategy).remote())]
        ((machine, cuda_index),) = results(calls, RESERVE_TIMEOUT_S, f"asking Ray for GPU {index} of its reservation")
        found.append(Bundle(strategy, machine, cuda_index))
    return sorted(found, key=lambda bundle: (len(bundle.cuda_index), bundle.cuda_index))  # 2 before 10


def _look() -> tuple[str, str]:
    """Runs in a bundle: the machine and the GPU."""
    import ray

    gpus: Callable[[], list[Any]] = ray.get_gpu_ids
    return str(ray.get_runtime_context().get_node_id()), str(gpus()[0])


def _affinity(machine: str) -> SchedulingStrategyT:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(machine, soft=False)


def _seats(
    config: Config, placement: Placement, bundles: Mapping[Device, Bundle], *, fake: bool
) -> dict[str, list[Seat]]:
    """A process of several GPUs sits in the bundle of its first; no other process counts on the rest of them."""
    reservation = process_reservation(config, placement)
    spread: SchedulingStrategyT = "SPREAD" if config.cluster.nodes > 1 else "DEFAULT"

    def seat(role: str, devices: Sequence[Device]) -> Seat:
        cpus = _cpus(config, reservation, role)
        if not devices:
            return Seat(cpus, strategy=spread)
        first, gpus = bundles[devices[0]], reservation.teacher_gpus if role.startswith(TEACHER) else reservation.gpus
        ids = tuple(bundles[device].cuda_index for device in devices)
        if any(bundles[device].machine != first.machine for device in devices):
            raise PreflightError(f"a replica of {role} would span machines; tqppo starts an engine on one machine only")
        return Seat(cpus, gpus, ids, first.strategy, has_fake_devices=fake)

    return {role: [seat(role, devices) for devices in seats] for role, seats in placement.roles.items()}
