"""Will the plan fit the cluster? Asked before any actor is made: Ray would wait for ever for what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqppo.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Demand:
    """What one role asks of Ray: so many processes, each with so much."""

    role: str
    ranks: int
    cpus: float = 1.0
    gpus: float = 0.0


def check_resources(demands: Sequence[Demand], available: Mapping[str, float]) -> None:
    """Raise `PreflightError` with the sums when the demands exceed `available` (as `ray.cluster_resources()` says)."""
    problems = [
        _shortage(demands, [getattr(demand, unit) for demand in demands], label, float(available.get(label, 0.0)))
        for unit, label in (("cpus", "CPU"), ("gpus", "GPU"))
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise PreflightError("\n".join(found))


def _shortage(demands: Sequence[Demand], each: Sequence[float], label: str, available: float) -> str:
    asked = [(demand, amount) for demand, amount in zip(demands, each, strict=True) if amount > 0]
    total = sum(demand.ranks * amount for demand, amount in asked)
    if total <= available + 1e-6:  # fractions of a GPU rarely add up to exactly 1
        return ""
    terms = " + ".join(f"{demand.role} {demand.ranks} × {amount:g}" for demand, amount in asked)
    advice = {
        "CPU": "lower cluster.cpus_per_worker, use fewer ranks or replicas, or join a larger cluster (cluster.address)",
        "GPU": "use fewer ranks or replicas, set cluster.colocate, or join a larger cluster (cluster.address)",
    }[label]
    return f"the plan needs {total:g} {label}s, the cluster has {available:g}: {terms} = {total:g}\n  {advice}"
