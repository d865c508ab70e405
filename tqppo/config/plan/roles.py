"""The roles of a run: how many processes, on which devices, with which model, and the memory of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tqppo.config import facts
from tqppo.config.facts import context_tokens, rows_per_step
from tqppo.config.placement import ranks_per_copy
from tqppo.config.plan.memory import MemoryPart, Training, engine_memory, prefix_memory, training_memory
from tqppo.config.plan.model_shape import ModelShape
from tqppo.config.plan.shapes import shape_of
from tqppo.config.plan.storage import storage_bytes
from tqppo.config.plan.teachers import output_layers, teacher_devices
from tqppo.config.sections import Config


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """The processes of one role. `memory` is for one process, or for one of its GPUs; empty if not known."""

    name: str
    processes: int
    devices: str
    model: str
    memory: list[MemoryPart]


def planned_roles(config: Config) -> list[PlannedRole]:
    return list(_roles(config))


def _roles(config: Config) -> Iterator[PlannedRole]:
    dtype, shape = facts.compute_dtype(config), facts.model_shape(config)
    yield _engine_role(config, shape, dtype)
    for role, ranks in facts.worker_roles(config).items():
        planned = _worker_role(config, role, ranks, shape, dtype)
        yield replace(planned, memory=[*planned.memory, *(output_layers(config) if role == "actor" else [])])
    yield from _teacher_roles(config, dtype)
    yield _storage_role(config)


def _worker_role(config: Config, role: str, ranks: int, shape: ModelShape | None, dtype: str) -> PlannedRole:
    """A role that computes over rows. `shape` is the actor's, which roles without a path of their own share."""
    section = facts.section_of(config, role)
    learns = role in facts.learning_roles(config)
    path = str(getattr(section, "path", ""))
    budget = section.micro_batch_tokens
    longest = rows_per_step(config) * config.rollout.max_trajectories * context_tokens(config) // ranks
    how = Training(
        ranks_per_copy(config, role) or ranks,
        min(budget, longest),
        dtype,
        learns=learns,
        checkpointing=learns and facts.optimizer_of(config, role).gradient_checkpointing,
        lora_rank=config.model.lora_rank if role == "actor" else 0,
        has_logits=role in ("actor", "reference"),
    )
    shape = shape_of(path) if path else shape
    if shape and not how.has_logits:
        shape = replace(shape, tied=True)  # critics and reward models have no output layer over the vocabulary
    parts = training_memory(shape, how) if shape else []
    together = f", {section.context_parallel} to a row" if section.context_parallel > 1 else ""
    return PlannedRole(role, ranks, _devices(config, ranks) + together, path or config.model.path, parts)


def _devices(config: Config, processes: int) -> str:
    if not config.cluster.gpus_per_node:
        return "CPU"
    return f"{processes} GPU{'s' if processes > 1 else ''}, {'shared' if config.cluster.colocate else 'its own'}"


def _engine_role(config: Config, shape: ModelShape | None, dtype: str) -> PlannedRole:
    rollout = config.rollout
    if rollout.endpoints:
        return PlannedRole("rollout", len(rollout.endpoints), "running servers", config.model.path, [])
    rows = facts.running_rows(config)
    tp, context = rollout.tensor_parallel, context_tokens(config)
    parts = engine_memory(shape, dtype=dtype, tensor_parallel=tp, rows=rows, context=context) if shape else []
    if shape:
        budget, sessions = facts.prefix_cache_bytes(config), facts.sessions_at_once(config)
        parts += prefix_memory(shape, dtype=dtype, budget=budget, sessions=sessions, context=context)
    return PlannedRole("rollout", rollout.replicas, _devices(config, rollout.replicas * tp), config.model.path, parts)


def _teacher_roles(config: Config, dtype: str) -> Iterator[PlannedRole]:
    for name, teacher in config.teachers.items() if facts.has_teachers(config) else ():
        devices = teacher_devices(config, name)
        if teacher.endpoints:
            yield PlannedRole(f"teacher {name}", len(teacher.endpoints), devices, teacher.path, [])
            continue
        shape, context = facts.teacher_shape(config, name), facts.teacher_context_tokens(config, name)
        is_cached = facts.engine(teacher.backend).reserves_memory and not config.distillation.gpus_per_node
        tp, rows = teacher.tensor_parallel, facts.teacher_rows(config) if is_cached else 1
        parts = engine_memory(shape, dtype=dtype, tensor_parallel=tp, rows=rows, context=context) if shape else []
        yield PlannedRole(f"teacher {name}", teacher.replicas, devices, teacher.path, parts)


def _storage_role(config: Config) -> PlannedRole:
    """The memory of a step's columns at full length, compared with the storage's budget."""
    num_bytes, formula = storage_bytes(config)
    part = MemoryPart("one step's columns", num_bytes, formula)
    budget = f"budget {config.storage.budget_gb:g} GiB per node"
    return PlannedRole("storage", 1, budget, config.storage.backend, [part])
