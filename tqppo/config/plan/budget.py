"""What is in the memory of a GPU at each stage of a step, and in that of a node, in /dev/shm and on the disk.

Colocated roles take turns: engines sleep while workers compute, and workers rest in the node's memory while others do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tqppo.config import facts
from tqppo.config.placement import ranks_per_copy
from tqppo.config.plan.memory import BYTES, MemoryPart, total
from tqppo.config.plan.roles import PlannedRole, planned_roles
from tqppo.config.plan.storage import storage_bytes
from tqppo.config.sections import Config, RolloutSection, TeacherSection
from tqppo.units import GIB

# Of each process with a GPU: CUDA's context, kernels, NCCL's buffers. From what is reported of such processes; not
# measured here.
DEVICE_CONTEXT = 1.0 * GIB
ASLEEP = 2.0 * GIB  # of an engine asleep: its context and its captured graphs
ENGINE_WORK = 1.0 * GIB  # of an engine, besides weights and cache
# Resident sizes of real CPU runs.
INTERPRETER = 0.5 * GIB  # own pages of Python with torch, transformers and Ray (0.3) and what its allocator keeps
SERVERS = {"vllm": 1.9 * GIB, "sglang": 2.4 * GIB}  # processes of an engine's server, besides weights and cache
DRIVER = 1.2 * GIB  # driver, index and estimator


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one device holds during a stage. `role` is the one at work."""

    stage: str
    role: str
    held: list[MemoryPart]

    @property
    def num_bytes(self) -> float:
        return total(self.held)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`gpu_bytes` is the size of a GPU; 0: not known. `unknown` are roles whose models have no known shape."""

    gpu_bytes: float = 0.0
    stages: list[StageMemory] = field(default_factory=list)
    host: list[MemoryPart] = field(default_factory=list)  # of the fullest node, with what is in /dev/shm
    shared: list[MemoryPart] = field(default_factory=list)  # in /dev/shm of the fullest node
    disk: list[MemoryPart] = field(default_factory=list)  # in the run's folder
    unknown: tuple[str, ...] = ()

    @property
    def overfull(self) -> list[StageMemory]:
        """The stages that need more than a GPU has."""
        return [stage for stage in self.stages if self.gpu_bytes and stage.num_bytes > self.gpu_bytes]


def make_budget(config: Config, gpu_bytes: float = 0.0) -> MemoryBudget:
    """The sums of a config. `gpu_bytes` is asked of a device, for configs that do not say it."""
    gpu_bytes = config.cluster.gpu_memory_gb * GIB or gpu_bytes
    roles = {role.name: role for role in planned_roles(config)}
    models = {name: role for name, role in roles.items() if name != "storage"}
    shared = list(_shared(config))
    return MemoryBudget(
        gpu_bytes=gpu_bytes,
        stages=list(_stages(config, models, gpu_bytes)),
        host=[*_host(config, models), *shared],
        shared=shared,
        disk=list(_disk(config)),
        unknown=tuple(name for name, role in models.items() if not role.memory and not _attaches(config, name)),
    )


def _attaches(config: Config, role: str) -> bool:
    if role == "rollout":
        return bool(config.rollout.endpoints)
    return role.startswith("teacher ") and bool(config.teachers[role.removeprefix("teacher ")].endpoints)


# -- a GPU -------------------------------------------------------------------------------------------------------------


def _stages(config: Config, roles: dict[str, PlannedRole], gpu_bytes: float) -> Iterator[StageMemory]:
    """Every stage that loads a GPU, with all that is on it then."""
    teachers = {name: role for name, role in roles.items() if name.startswith("teacher ")}
    if config.distillation.gpus_per_node:
        for name, role in teachers.items():
            if role.memory:
                section = config.teachers[name.removeprefix("teacher ")]
                yield StageMemory("score", name, [*_engine(role, _share(section), gpu_bytes), _context(1)])
    if not config.cluster.gpus_per_node:
        return
    own = {name: role for name, role in roles.items() if name not in teachers and not _attaches(config, name)}
    others = len(own) - 1 if config.cluster.colocate else 0
    if "rollout" in own and own["rollout"].memory:
        held = _engine(own["rollout"], _share(config.rollout), gpu_bytes)
        yield StageMemory("generate", "rollout", [*held, _context(1 + others)])
    for name, role in own.items():
        if name != "rollout" and role.memory:
            yield StageMemory(f"compute {name}", name, [*role.memory, *_rest_of_device(config, own, others)])
    if config.cluster.colocate and "rollout" in own and own["rollout"].memory:
        yield StageMemory("load weights", "actor", [*_loading(config, own), _context(1 + others)])


def _rest_of_device(config: Config, own: dict[str, PlannedRole], others: int) -> list[MemoryPart]:
    """What a device holds besides the worker that computes: the engine asleep, contexts of all processes."""
    sleeps = config.cluster.colocate and "rollout" in own
    asleep = [MemoryPart("engine asleep", ASLEEP, "its context and captured graphs")] if sleeps else []
    return [*asleep, _context(1 + others - (1 if sleeps else 0))]


def _loading(config: Config, own: dict[str, PlannedRole]) -> list[MemoryPart]:
    """The actor's weights and the engine's, which wakes for them without its cache."""
    weights = next(part for part in own["actor"].memory if part.name == "weights")
    engine = next(part for part in own["rollout"].memory if part.name == "weights")
    return [
        MemoryPart("actor's weights", weights.num_bytes, weights.formula),
        MemoryPart("engine's weights", engine.num_bytes, engine.formula),
        MemoryPart("engine", ENGINE_WORK, "captured graphs"),
    ]


def _context(processes: int) -> MemoryPart:
    return MemoryPart("contexts", processes * DEVICE_CONTEXT, f"{processes} processes × {DEVICE_CONTEXT / GIB:g} GiB")


def _share(section: RolloutSection | TeacherSection) -> float:
    """The part of a GPU that an engine takes for itself; 0 if it takes what it uses."""
    return section.memory_fraction if facts.engine(section.backend).reserves_memory else 0.0


def _engine(role: PlannedRole, share: float, gpu_bytes: float) -> list[MemoryPart]:
    """An engine that is given a share of the GPU takes all of it: what its weights leave is its cache."""
    if share and gpu_bytes:
        return [MemoryPart("engine", share * gpu_bytes, f"memory_fraction {share:g} × {gpu_bytes / GIB:g} GiB")]
    return [*role.memory, MemoryPart("engine", ENGINE_WORK, "its own tensors")]


def engine_shortage(config: Config, gpu_bytes: float) -> dict[str, tuple[float, float]]:
    """Engines whose weights and one sequence do not fit into their share of a GPU: key → (needed, share)."""
    found = {}
    roles = {role.name: role for role in planned_roles(config)}
    has_own = config.cluster.gpus_per_node and not config.rollout.endpoints
    engines = {"rollout": _share(config.rollout)} if has_own else {}
    if facts.has_teachers(config) and config.distillation.gpus_per_node:
        engines |= {f"teacher {name}": _share(each) for name, each in config.teachers.items() if not each.endpoints}
    for name, share in engines.items():
        if not share:
            continue
        parts = {part.name: part.num_bytes for part in roles[name].memory}
        rows = facts.running_rows(config) if name == "rollout" else 1
        needed = parts["weights"] + parts["KV cache"] / rows + ENGINE_WORK if parts else 0.0
        if gpu_bytes and needed > share * gpu_bytes:
            key = "rollout" if name == "rollout" else f"teachers.{name.removeprefix('teacher ')}"
            found[f"{key}.memory_fraction"] = (needed, share * gpu_bytes)
    return found


# -- a node ------------------------------------------------------------------------------------------------------------


def _host(config: Config, roles: dict[str, PlannedRole]) -> Iterator[MemoryPart]:
    """The memory of one node. Processes are spread evenly; the driver's node has the driver too."""
    in_process = config.cluster.in_process
    yield MemoryPart("the process" if in_process else "driver, index, estimator", DRIVER, "measured")
    for name, role in roles.items():
        on_gpu = config.distillation.gpus_per_node if name.startswith("teacher ") else config.cluster.gpus_per_node
        nodes = config.distillation.nodes if name.startswith("teacher ") else config.cluster.nodes
        if _attaches(config, name) or (name.startswith("teacher ") and on_gpu):
            continue  # a running server, or a node of the teachers' own pool
        count = -(-role.processes // nodes)
        each = INTERPRETER + _server(config, name)
        if not in_process:
            yield MemoryPart(f"{name}: interpreters", count * each, f"{count} × {each / GIB:.2g} GiB")
        if not on_gpu:
            yield MemoryPart(f"{name}: models", count * total(role.memory), f"{count} × its memory")
        elif config.cluster.colocate and len(roles) > 1:
            yield _rested(config, role, count)
        if config.checkpoint.background and name in facts.learning_roles(config):
            yield MemoryPart(f"{name}: copy to save", count * _saved(role), f"{count} × weights and optimizer")


def _server(config: Config, role: str) -> float:
    backend = ""
    if role == "rollout":
        backend = config.rollout.backend
    elif role.startswith("teacher "):
        backend = config.teachers[role.removeprefix("teacher ")].backend
    return SERVERS.get(backend, 0.0)


def _rested(config: Config, role: PlannedRole, count: int) -> MemoryPart:
    """What a role leaves in the node's memory while others use its GPU."""
    parts = {part.name: part.num_bytes for part in role.memory}
    kept = sum(parts.get(name, 0.0) for name in ("weights", "optimizer", "adapter"))
    devices = count * (config.rollout.tensor_parallel if role.name == "rollout" else 1)
    return MemoryPart(f"{role.name}: at rest", devices * kept, f"{devices} × weights and optimizer")


def _shared(config: Config) -> Iterator[MemoryPart]:
    """Segments of columns, and the weights on their way to the engines: the version in use and the next one."""
    if config.storage.backend == "simple" and not config.storage.dir:
        steps = config.rollout.ahead + 1
        columns = min(steps * storage_bytes(config)[0], config.storage.budget_gb * GIB)
        name = "one step's columns" if steps == 1 else f"columns of {steps} steps"
        yield MemoryPart(name, columns, "at most storage.budget_gb")
    shape = facts.model_shape(config)
    if shape:
        b, versions = BYTES[facts.compute_dtype(config)], facts.published_versions(config)
        formula = f"{versions}·b·N = {versions} × {b} × {shape.parameters:,}"
        yield MemoryPart("published weights", versions * b * shape.parameters, formula)


def _disk(config: Config) -> Iterator[MemoryPart]:
    """Checkpoints, one more than are kept while the newest is written, and the export."""
    roles = {role.name: role for role in planned_roles(config)}
    saved = 0.0
    for name in facts.learning_roles(config):
        saved += ranks_per_copy(config, name) * _saved(roles[name])  # one copy is saved
    copies = config.checkpoint.keep_last + 1
    if saved and (config.checkpoint.interval or config.checkpoint.save_on_exit):
        yield MemoryPart("checkpoints", copies * saved, f"{copies} × weights and optimizer")
    shape = facts.model_shape(config)
    if shape and config.checkpoint.export:
        b = BYTES[facts.compute_dtype(config)]
        yield MemoryPart("export", b * shape.parameters, f"b·N = {b} × {shape.parameters:,}")


def _saved(role: PlannedRole) -> float:
    """What one rank writes into a checkpoint."""
    parts = {part.name: part.num_bytes for part in role.memory}
    adapter = parts.get("adapter")  # with its gradients, which are not saved
    return adapter * 3 / 4 if adapter else parts.get("weights", 0.0) + parts.get("optimizer", 0.0)
