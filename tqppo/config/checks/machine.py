"""The plan fits this machine: its memory, /dev/shm, the disk, and its GPUs where the config does not state their size.

Not among the checks of a config, because a config may be written on another machine than it runs on. `--probe` and the
start of a run ask.
"""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.memory import too_large_for_a_gpu
from tqppo.config.checks.registry import Context
from tqppo.config.diagnostics import Diagnostic, render_text
from tqppo.config.plan.budget import MemoryBudget, make_budget
from tqppo.config.plan.machine import Machine
from tqppo.config.plan.memory import MemoryPart, total
from tqppo.config.plan.remedies import for_host, remedies
from tqppo.config.sections import Config
from tqppo.errors import PreflightError
from tqppo.units import GIB, size

SHOWN = 4  # largest parts of a sum that a message names


def check_machine(context: Context, machine: Machine) -> None:
    """Raise `PreflightError` with everything that this machine lacks."""
    found = [each for each in lacking(context, machine) if each.severity == "error"]
    if found:
        raise PreflightError(render_text(found).rstrip("\n"))


def lacking(context: Context, machine: Machine) -> Iterator[Diagnostic]:
    """Everything that does not fit. Of a cluster that is joined only the disk is looked at: its nodes are elsewhere."""
    config = context.config
    budget = make_budget(config, machine.gpu)
    if not config.cluster.address:
        if not config.cluster.gpu_memory_gb:
            yield from too_large_for_a_gpu(context, machine.gpu if config.cluster.gpus_per_node else 0.0, "E615")
        yield from _memory(context, budget, machine)
        yield from _shared(context, budget, machine)
    parts = [part for part in budget.disk if part.name != "checkpoints" or config.checkpoint.on_full_disk == "stop"]
    needed = total(parts)
    if needed > machine.disk:
        message = f"the run would write {size(needed)}, and {size(machine.disk)} are free on the disk of run.dir"
        keys = ("run.dir", "checkpoint.keep_last", "checkpoint.export")
        fix = "set run.dir to a larger disk, or checkpoint.keep_last = 1, or checkpoint.export = false"
        yield context.report("E614", message, keys, found=_parts(parts), fix=fix)


def _memory(context: Context, budget: MemoryBudget, machine: Machine) -> Iterator[Diagnostic]:
    needed = total(budget.host)
    if not machine.memory or needed <= machine.memory:
        return

    def fits(config: Config) -> bool:
        return total(make_budget(config, machine.gpu).host) <= machine.memory

    message = f"the run's processes need {size(needed)} of memory, and this machine has {size(machine.memory)}"
    fix = remedies(context.config, fits, for_host(context.config)) or "use a smaller model, or a larger machine"
    keys = ("model.path", "actor.micro_batch_tokens", "rollout.max_running")
    yield context.report("E612", message, keys, found=_parts(budget.host), fix=fix)


def _shared(context: Context, budget: MemoryBudget, machine: Machine) -> Iterator[Diagnostic]:
    """Weights and columns that do not fit into /dev/shm go through files elsewhere, which is slower."""
    needed = total(budget.shared)
    if machine.shared and needed > machine.shared:
        message = (
            f"/dev/shm has {size(machine.shared)} free, and new weights on their way to engines take {size(needed)}"
        )
        fix = f"enlarge /dev/shm (a container: --shm-size={needed / GIB * 1.1 + 1:.0f}g)"
        yield context.report("W613", message, ("model.path",), found=_parts(budget.shared), fix=fix)


def _parts(parts: list[MemoryPart]) -> str:
    """The largest parts of a sum, and how much the others are."""
    ordered = sorted(parts, key=lambda part: -part.num_bytes)
    shown = [f"{part.name} {size(part.num_bytes)}" for part in ordered[:SHOWN]]
    rest = total(ordered[SHOWN:])
    return " + ".join([*shown, *([f"others {size(rest)}"] if rest else [])])
