"""The plan of a run before it starts: rows and updates per step, roles with devices and memory, files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tqppo import columns
from tqppo.config import facts
from tqppo.config.facts import context_tokens, model_shape, required_multiple, rows_per_step
from tqppo.config.placement import placement_of
from tqppo.config.plan.memory import BYTES, MemoryPart, Training, engine_memory, size, training_memory
from tqppo.config.plan.shapes import ModelShape, shape_of
from tqppo.config.plan.teachers import (
    PlannedDistillation,
    hidden_width,
    output_layers,
    planned_distillation,
    teacher_devices,
)
from tqppo.placement import Placement

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation
    from tqppo.config.sections import Config

_SIZES = {"int64": 8, "int32": 4, "int16": 2, "bool": 1, "float32": 4}


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """The processes of one role. `memory` is for one process, or for one of its GPUs; empty if not known."""

    name: str
    processes: int
    devices: str
    model: str
    memory: list[MemoryPart]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of the step, with the columns that it reads and writes in this run."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    mode: str
    engine: str
    storage: str
    model: str
    parameters: int | None
    steps: int
    prompts: int
    sessions: int
    rows: int
    multiple: int
    padding: int
    mini_batches: dict[str, int]  # per step and epoch, of each role that learns
    updates: dict[str, int]  # optimizer steps per training step
    tokens: int  # the longest row
    stages: list[PlannedStage]
    roles: list[PlannedRole]
    files: list[tuple[str, str]]
    placement: Placement
    distillation: PlannedDistillation | None = None

    def as_dict(self) -> dict[str, Any]:
        plan = asdict(self)
        for role in plan["roles"]:
            role["memory_bytes"] = round(sum(part["num_bytes"] for part in role["memory"]))
        plan["files"] = dict(self.files)
        return plan


def make_plan(compilation: Compilation) -> Plan:
    config = compilation.draft
    rows, multiple = rows_per_step(config), required_multiple(config)
    shape = model_shape(config)
    minis = {role: _mini_batches(config, role, rows + -rows % multiple) for role in facts.learning_roles(config)}
    return Plan(
        mode=config.mode,
        engine=config.rollout.backend,
        storage=config.storage.backend,
        model=config.model.path,
        parameters=shape.parameters if shape else None,
        steps=config.run.max_steps,
        prompts=config.data.batch_size,
        sessions=config.rollout.group_size,
        rows=rows,
        multiple=multiple,
        padding=-rows % multiple,
        mini_batches=minis,
        updates={role: n * facts.optimizer_of(config, role).epochs for role, n in minis.items()},
        tokens=context_tokens(config),
        stages=planned_stages(config),
        roles=list(_roles(config, shape)),
        files=list(_files(config, compilation.name)),
        distillation=planned_distillation(config),
        placement=placement_of(config),
    )


def planned_stages(config: Config) -> list[PlannedStage]:
    features = facts.features(config)
    return [PlannedStage(stage.name, stage.reads(features), stage.writes(features)) for stage in facts.stages(config)]


def _mini_batches(config: Config, role: str, padded: int) -> int:
    return padded // (facts.mini_batch_rows(config, role) or padded)


def _roles(config: Config, shape: ModelShape | None) -> Iterator[PlannedRole]:
    dtype = facts.compute_dtype(config)
    yield _engine_role(config, shape, dtype)
    for role, ranks in facts.worker_roles(config).items():
        planned = _worker_role(config, role, ranks, shape, dtype)
        yield replace(planned, memory=[*planned.memory, *(output_layers(config) if role == "actor" else [])])
    yield from _teacher_roles(config, dtype)
    yield _storage_role(config)


def _worker_role(config: Config, role: str, ranks: int, shape: ModelShape | None, dtype: str) -> PlannedRole:
    """A role that computes over rows. `shape` is the actor's, which roles without a path of their own share."""
    frozen = config.reward_model if role == "reward_model" else config.reference
    learns = role in facts.learning_roles(config)
    path = frozen.path if not learns else config.critic.path if role == "critic" else ""
    budget = (facts.optimizer_of(config, role) if learns else frozen).micro_batch_tokens
    longest = rows_per_step(config) * config.rollout.max_trajectories * context_tokens(config) // ranks
    how = Training(
        ranks,
        min(budget, longest),
        dtype,
        learns=learns,
        checkpointing=learns and facts.optimizer_of(config, role).gradient_checkpointing,
        lora_rank=config.model.lora_rank if role == "actor" else 0,
        has_logits=role in ("actor", "reference"),
    )
    shape = shape_of(path) if path else shape
    parts = training_memory(shape, how) if shape else []
    return PlannedRole(role, ranks, _devices(config, ranks), path or config.model.path, parts)


def _devices(config: Config, processes: int) -> str:
    if not config.cluster.gpus_per_node:
        return "CPU"
    return f"{processes} GPU{'s' if processes > 1 else ''}, {'shared' if config.cluster.colocate else 'its own'}"


def _engine_role(config: Config, shape: ModelShape | None, dtype: str) -> PlannedRole:
    rollout = config.rollout
    if rollout.endpoints:
        return PlannedRole("rollout", len(rollout.endpoints), "running servers", config.model.path, [])
    rows = min(rollout.max_running, -(-rows_per_step(config) // rollout.replicas))
    tp, context = rollout.tensor_parallel, context_tokens(config)
    parts = engine_memory(shape, dtype=dtype, tensor_parallel=tp, rows=rows, context=context) if shape else []
    return PlannedRole("rollout", rollout.replicas, _devices(config, rollout.replicas * tp), config.model.path, parts)


def _teacher_roles(config: Config, dtype: str) -> Iterator[PlannedRole]:
    for name, teacher in config.teachers.items() if facts.has_teachers(config) else ():
        devices = teacher_devices(config, name)
        if teacher.endpoints:
            yield PlannedRole(f"teacher {name}", len(teacher.endpoints), devices, teacher.path, [])
            continue
        shape, context = facts.teacher_shape(config, name), facts.teacher_context_tokens(config, name)
        tp, rows = teacher.tensor_parallel, 1
        parts = engine_memory(shape, dtype=dtype, tensor_parallel=tp, rows=rows, context=context) if shape else []
        yield PlannedRole(f"teacher {name}", teacher.replicas, devices, teacher.path, parts)


def _storage_role(config: Config) -> PlannedRole:
    """The memory of a step's columns at full length, beside the storage's budget."""
    num_bytes, formula = storage_bytes(config)
    part = MemoryPart("one step's columns", num_bytes, formula)
    budget = f"budget {config.storage.budget_gb:g} GiB per node"
    return PlannedRole("storage", 1, budget, config.storage.backend, [part])


def storage_bytes(config: Config) -> tuple[float, str]:
    """Bytes of all columns of a step whose rows all have the full length, and the formula."""
    sequence, response = context_tokens(config), config.rollout.max_new_tokens
    per_row = 0
    for name in dict.fromkeys(each for stage in planned_stages(config) for each in stage.writes):
        column = columns.column(name)
        length = {"sequence": sequence, "response": response}.get(column.kind.value, 1)
        width = hidden_width(config) if name == "teacher_hidden" else facts.features(config).teacher_top_k
        item = BYTES[facts.compute_dtype(config)] if name == "teacher_hidden" else _SIZES.get(column.dtype, 4)
        per_row += item * length * ((width or 1) if column.trailing else 1)
    sessions = rows_per_step(config)
    rows = sessions * config.rollout.max_trajectories + -sessions % required_multiple(config)
    return rows * per_row, f"rows × Σ columns = {rows:,} × {per_row:,}"


def _files(config: Config, name: str) -> Iterator[tuple[str, str]]:
    """Paths under the run's folder, and what the run writes there."""
    model = config.model.path.rstrip("/").rpartition("/")[2]
    folder = f"{config.run.dir.rstrip('/')}/{config.run.name or f'{name}-{model}-…'}"
    yield f"{folder}/", "config.resolved.toml, config.origins.json, metrics.jsonl, events.jsonl, logs/"
    every = f"every {config.checkpoint.interval} steps" if config.checkpoint.interval else ""
    at_end = "at the end and on a signal" if config.checkpoint.save_on_exit else ""
    when = ", ".join(each for each in (every, at_end) if each)
    if when:
        yield f"{folder}/checkpoints/", f"{when}; the newest {config.checkpoint.keep_last} are kept"
    if config.logging.trajectories:
        yield f"{folder}/trajectories/", f"every {config.logging.trajectories} steps"
    if config.checkpoint.export:
        shape = model_shape(config)
        weights = f", about {size(shape.parameters * BYTES[facts.compute_dtype(config)])}" if shape else ""
        yield f"{folder}/export/hf/", f"the final weights as a Hugging Face folder{weights}"
