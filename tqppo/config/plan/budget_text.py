"""The sums of memory as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.plan.budget import MemoryBudget
from tqppo.config.plan.memory import MemoryPart, total
from tqppo.units import size


def budget_text(budget: MemoryBudget, *, formulas: bool = False) -> Iterator[str]:
    """A line for each stage on a GPU, and one each for a node's memory, /dev/shm and the disk."""
    if budget.unknown:
        yield f"Not in these sums, because the shape of the model is not known: {', '.join(budget.unknown)}"
    if budget.stages:
        limit = f"of {size(budget.gpu_bytes)} " if budget.gpu_bytes else ""
        yield f"A GPU {limit}holds at most:"
        names = [f"score ({stage.role})" if stage.stage == "score" else stage.stage for stage in budget.stages]
        width = max(map(len, names))
        for name, stage in zip(names, budget.stages, strict=True):
            yield f"  {name:<{width}}  {size(stage.num_bytes):>9}  {_sum(stage.held)}"
            yield from _formulas(stage.held) if formulas else ()
    for name, parts in (("memory", budget.host), ("/dev/shm", budget.shared), ("disk", budget.disk)):
        if parts:
            yield f"{_PLACES[name]:<24} {size(total(parts)):>9}  {_sum(parts)}"
            yield from _formulas(parts) if formulas else ()


_PLACES = {"memory": "A node's memory:", "/dev/shm": "  of it in /dev/shm:", "disk": "On the disk:"}


def _sum(parts: list[MemoryPart]) -> str:
    return " + ".join(f"{part.name} {size(part.num_bytes)}" for part in parts)


def _formulas(parts: list[MemoryPart]) -> Iterator[str]:
    for part in parts:
        yield f"    {part.name:<26} {size(part.num_bytes):>9}  {part.formula}"
