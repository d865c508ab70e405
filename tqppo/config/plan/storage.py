"""The stages of a step with their columns, and the bytes of a step's columns."""

from __future__ import annotations

from dataclasses import dataclass

from tqppo import columns
from tqppo.config import facts
from tqppo.config.facts import context_tokens, required_multiple, rows_per_step
from tqppo.config.plan.memory import BYTES
from tqppo.config.plan.teachers import hidden_width
from tqppo.config.sections import Config

_SIZES = {"int64": 8, "int32": 4, "int16": 2, "bool": 1, "float32": 4}


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of the step, with the columns that it reads and writes in this run."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def planned_stages(config: Config) -> list[PlannedStage]:
    features = facts.features(config)
    return [PlannedStage(stage.name, stage.reads(features), stage.writes(features)) for stage in facts.stages(config)]


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
    padding = columns.rows_of_padding(sessions, required_multiple(config))
    rows = sessions * config.rollout.max_trajectories + padding
    return rows * per_row, f"rows × Σ columns = {rows:,} × {per_row:,}"
