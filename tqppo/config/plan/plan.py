"""The plan of a run before it starts: rows and updates per step, roles with devices and memory, files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tqppo.columns import rows_of_padding
from tqppo.config import facts
from tqppo.config.facts import context_tokens, model_shape, required_multiple, rows_per_step
from tqppo.config.placement import placement_of
from tqppo.config.plan.budget import MemoryBudget, make_budget
from tqppo.config.plan.memory import weight_bytes
from tqppo.config.plan.roles import PlannedRole, planned_roles
from tqppo.config.plan.storage import PlannedStage, planned_stages
from tqppo.config.plan.teachers import PlannedDistillation, planned_distillation
from tqppo.devices.placement import Placement
from tqppo.units import size

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation
    from tqppo.config.sections import Config


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
    rows: int  # with one trajectory per session
    trajectories: int  # that a session may become
    multiple: int
    padding: int
    mini_batches: dict[str, int]  # per step and epoch, of each role that learns
    updates: dict[str, int]  # optimizer steps per training step
    tokens: int  # the longest row
    stages: list[PlannedStage]
    ahead: int  # steps that engines sample in front of training
    side_by_side: bool  # whether they do so while other stages compute
    roles: list[PlannedRole]
    files: list[tuple[str, str]]
    placement: Placement
    threads: dict[str, int]  # torch's, of each process of a role; 0: its own choice
    cores: int  # that they share; 0: not known
    distillation: PlannedDistillation | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)

    def as_dict(self) -> dict[str, Any]:
        plan = asdict(self)
        for role in plan["roles"]:
            role["memory_bytes"] = round(sum(part["num_bytes"] for part in role["memory"]))
        plan["files"] = dict(self.files)
        return plan


def make_plan(compilation: Compilation) -> Plan:
    config = compilation.draft
    rows, multiple = rows_per_step(config), required_multiple(config)
    padding = rows_of_padding(rows, multiple)
    shape = model_shape(config)
    minis = {role: _mini_batches(config, role, rows + padding) for role in facts.learning_roles(config)}
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
        trajectories=config.rollout.max_trajectories,
        multiple=multiple,
        padding=padding,
        mini_batches=minis,
        updates={role: n * facts.optimizer_of(config, role).epochs for role, n in minis.items()},
        tokens=context_tokens(config),
        stages=planned_stages(config),
        ahead=config.rollout.ahead,
        side_by_side=config.rollout.ahead > 0 and not config.cluster.in_process,
        roles=planned_roles(config),
        files=list(_files(config, compilation.name)),
        distillation=planned_distillation(config),
        placement=placement_of(config),
        threads=facts.threads(config),
        cores=config.run.cores,
        budget=make_budget(config),
    )


def _mini_batches(config: Config, role: str, padded: int) -> int:
    return padded // (facts.mini_batch_rows(config, role) or padded)


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
        weights = f", about {size(weight_bytes(shape, facts.compute_dtype(config)))}" if shape else ""
        yield f"{folder}/export/hf/", f"the final weights as a Hugging Face folder{weights}"
