"""What the run's processes ask of Ray, and whether the cluster has it.

Asked before any process starts, because Ray waits for ever for resources that no node has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqppo.config import facts
from tqppo.config.sections import Config
from tqppo.errors import PreflightError


@dataclass(frozen=True, slots=True)
class ProcessShares:
    """What one process reserves. Roles that take turns on a device reserve a fraction each, so that all fit at once."""

    cpus: float
    gpus: float
    engine_gpus: float
    teacher_cpus: float = 1.0
    teachers_have_gpus: bool = False

    def of_teacher(self, tensor_parallel: int, *, attaches: bool) -> TeacherShare:
        """A teacher's replica has devices of its own; one that attaches to a server only passes tokens on."""
        if attaches:
            return TeacherShare(0.0, 0.0)
        return TeacherShare(self.teacher_cpus, float(tensor_parallel) if self.teachers_have_gpus else 0.0)


@dataclass(frozen=True, slots=True)
class TeacherShare:
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What one role asks of Ray: a number of processes, and the resources of each."""

    role: str
    processes: int
    cpus: float = 1.0
    gpus: float = 0.0


def process_shares(config: Config) -> ProcessShares:
    cluster = config.cluster
    sharing = len(facts.roles(config)) if cluster.colocate else 1
    gpus = 1.0 / sharing if cluster.gpus_per_node else 0.0
    teachers = config.teachers if facts.has_teachers(config) else {}
    has_gpus = bool(config.distillation.gpus_per_node)
    # Teachers without GPUs share the cores with all other roles: they score while the student samples.
    parties = (
        sharing + sum(each.replicas for each in teachers.values()) if not has_gpus and cluster.colocate else sharing
    )
    cpus = cluster.cpus_per_worker / parties
    teacher_cpus = cluster.cpus_per_worker if has_gpus or not cluster.colocate else cpus
    return ProcessShares(cpus, gpus, gpus * config.rollout.tensor_parallel, teacher_cpus, has_gpus)


def demands(config: Config) -> list[Demand]:
    share = process_shares(config)
    found = [
        Demand(role, count, share.cpus, share.engine_gpus if role == "rollout" else share.gpus)
        for role, count in facts.roles(config).items()
    ]
    for name, teacher in config.teachers.items() if facts.has_teachers(config) else ():
        own = share.of_teacher(teacher.tensor_parallel, attaches=bool(teacher.endpoints))
        found.append(Demand(f"teacher {name}", len(teacher.endpoints) or teacher.replicas, own.cpus, own.gpus))
    return found


def check_resources(demands: Sequence[Demand], available: Mapping[str, float]) -> None:
    """Raise `PreflightError` with the sums if the demands exceed `available`, as `ray.cluster_resources()` gives it."""
    problems = [
        _shortage([(demand, demand.cpus) for demand in demands], "CPU", float(available.get("CPU", 0.0))),
        _shortage([(demand, demand.gpus) for demand in demands], "GPU", float(available.get("GPU", 0.0))),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise PreflightError("\n".join(found))


_ADVICE = {
    "CPU": "lower cluster.cpus_per_worker, use fewer ranks or replicas, or join a larger cluster (cluster.address)",
    "GPU": "use fewer ranks or replicas, set cluster.colocate, or join a larger cluster (cluster.address)",
}


def _shortage(amounts: Sequence[tuple[Demand, float]], label: str, available: float) -> str:
    asked = [(demand, amount) for demand, amount in amounts if amount > 0]
    total = sum(demand.processes * amount for demand, amount in asked)
    if total <= available + 1e-6:  # fractions of a GPU rarely add up to exactly 1
        return ""
    terms = " + ".join(f"{demand.role} {demand.processes} × {amount:g}" for demand, amount in asked)
    return f"the plan needs {total:g} {label}s, the cluster has {available:g}: {terms} = {total:g}\n  {_ADVICE[label]}"
