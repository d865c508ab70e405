"""Each stage of a step fits into the memory of a GPU, if its size is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tqppo.config import facts
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.plan.budget import MemoryBudget, StageMemory, engine_shortage, make_budget
from tqppo.config.plan.remedies import fits_gpu, for_engine, for_worker, remedies
from tqppo.config.sections import Config
from tqppo.units import GIB, size

READS = ("mode", "model.*", "cluster.*", "rollout.*", "actor.*", "critic.*", "reference.*", "reward_model.*", "data.*")


@check(*READS, "algorithm.*", "teachers.*", "distillation.*")
def stages_fit_a_gpu(context: Context) -> Iterator[Diagnostic]:
    yield from too_large_for_a_gpu(context, context.config.cluster.gpu_memory_gb * GIB)


def too_large_for_a_gpu(context: Context, gpu_bytes: float, code: str = "E422") -> Iterator[Diagnostic]:
    """A problem for each role that does not fit on a GPU of this size, and for each engine whose share is too small."""
    if not gpu_bytes:
        return
    config = context.config
    for key, (needed, share) in engine_shortage(config, gpu_bytes).items():
        fix = remedies(config, _engine_fits(key, gpu_bytes), for_engine(config, key))
        message = f"an engine needs at least {size(needed)} of each GPU, and its share is {size(share)}"
        keys = (key, f"{key.rpartition('.')[0]}.tensor_parallel", "cluster.gpu_memory_gb")
        yield context.report(code, message, keys, allowed=f"at least {needed / gpu_bytes:.2f}", fix=fix)
    for stage in _largest(make_budget(config, gpu_bytes)):
        yield _report(context, stage, gpu_bytes, code)


def _engine_fits(key: str, gpu_bytes: float) -> Callable[[Config], bool]:
    return lambda config: key not in engine_shortage(config, gpu_bytes)


def _largest(budget: MemoryBudget) -> list[StageMemory]:
    """The stages that do not fit, the largest of each role."""
    found: dict[str, StageMemory] = {}
    for stage in budget.overfull:
        if stage.role not in found or stage.num_bytes > found[stage.role].num_bytes:
            found[stage.role] = stage
    return list(found.values())


def _report(context: Context, stage: StageMemory, gpu_bytes: float, code: str) -> Diagnostic:
    config = context.config
    sum_of = " + ".join(f"{part.name} {size(part.num_bytes)}" for part in stage.held)
    message = f"{stage.stage}: a GPU would hold {size(stage.num_bytes)}, and it has {size(gpu_bytes)}"
    fix = remedies(config, fits_gpu(lambda each: make_budget(each, gpu_bytes), stage), _candidates(config, stage))
    return context.report(code, message, _keys(config, stage), found=sum_of, fix=fix or "use larger or more GPUs")


def _candidates(config: Config, stage: StageMemory) -> Iterator[dict[str, object]]:
    if stage.role in facts.worker_roles(config) and stage.stage != "load weights":
        return for_worker(config, stage.role)
    return for_engine(config, "rollout.memory_fraction") if stage.role in ("rollout", "actor") else iter(())


def _keys(config: Config, stage: StageMemory) -> tuple[str, ...]:
    if stage.role.startswith("teacher "):
        section = f"teachers.{stage.role.removeprefix('teacher ')}"
        return f"{section}.memory_fraction", f"{section}.tensor_parallel", "cluster.gpu_memory_gb"
    if stage.role == "rollout":
        return "rollout.memory_fraction", "rollout.tensor_parallel", "cluster.gpu_memory_gb"
    return f"{stage.role}.micro_batch_tokens", f"{stage.role}.ranks", "model.path", "cluster.gpu_memory_gb"
