"""The part of the plan about distillation: each teacher with its engine and devices, the loss, the bytes of columns."""

from __future__ import annotations

from dataclasses import dataclass

from tqppo.config import facts
from tqppo.config.plan.memory import BYTES, MemoryPart
from tqppo.config.sections import Config


@dataclass(frozen=True, slots=True)
class PlannedTeacher:
    """One teacher. `scores` are the values of the routing column; empty: every row."""

    name: str
    model: str
    engine: str
    replicas: int
    devices: str
    context_tokens: int
    scores: tuple[str, ...]
    prompt: str


@dataclass(frozen=True, slots=True)
class PlannedDistillation:
    """`bytes_per_token` is of each column that teachers write; empty if a teacher's width is not known."""

    loss: str
    update: str
    task_reward: bool
    route_by: str
    bytes_per_token: dict[str, int]
    teachers: list[PlannedTeacher]


def planned_distillation(config: Config) -> PlannedDistillation | None:
    if not facts.has_teachers(config):
        return None
    section = config.distillation
    return PlannedDistillation(
        loss=section.loss,
        update=section.update,
        task_reward=section.task_reward,
        route_by=section.route_by if facts.routes_rows(config) else "",
        bytes_per_token=teacher_bytes(config),
        teachers=[_teacher(config, name) for name in config.teachers],
    )


def _teacher(config: Config, name: str) -> PlannedTeacher:
    teacher = config.teachers[name]
    return PlannedTeacher(
        name=name,
        model=teacher.path,
        engine=teacher.backend,
        replicas=len(teacher.endpoints) or teacher.replicas,
        devices=teacher_devices(config, name),
        context_tokens=facts.teacher_context_tokens(config, name),
        scores=tuple(teacher.match),
        prompt=teacher.prompt,
    )


def teacher_devices(config: Config, name: str) -> str:
    teacher = config.teachers[name]
    if teacher.endpoints:
        return "running servers"
    if not config.distillation.gpus_per_node:
        return "CPU"
    gpus = teacher.replicas * teacher.tensor_parallel
    return f"{gpus} GPU{'s' if gpus > 1 else ''} of the pool"


def teacher_bytes(config: Config) -> dict[str, int]:
    """Bytes per token of the columns that teachers write."""
    features = facts.features(config)
    if not features.has_teachers:
        return {}
    if features.teacher_hidden:
        width = hidden_width(config)
        return {"teacher_hidden": width * BYTES[facts.compute_dtype(config)]} if width else {}
    if features.teacher_top_k:
        return {"teacher_ids": 4 * features.teacher_top_k, "teacher_logprobs": 4 * features.teacher_top_k}
    return {"teacher_logprobs": 4}


def hidden_width(config: Config) -> int:
    """The width of the column of hidden states: that of the widest teacher. 0: not known."""
    shapes = [facts.teacher_shape(config, name) for name in config.teachers]
    return max((shape.hidden for shape in shapes if shape is not None), default=0)


def output_layers(config: Config) -> list[MemoryPart]:
    """What a rank of the student holds of its teachers: their output layers, which turn hidden states into logits."""
    if not facts.features(config).teacher_hidden:
        return []
    shapes = [facts.teacher_shape(config, name) for name in config.teachers]
    sizes = [shape.vocabulary * shape.hidden for shape in shapes if shape is not None]
    item = BYTES[facts.compute_dtype(config)]
    formula = f"b·Σ V·h of each teacher = {item} × {sum(sizes):,}"
    return [MemoryPart("teachers' outputs", item * sum(sizes), formula)]
