"""The columns of a row, declared once: name, kind, dtype, shape, neutral value, writer and readers. Imports no torch.

A row is one trajectory: a sequence of S = P + R tokens, prompt then response. A model's output at
position t scores token t + 1; response columns have R entries, entry i belonging to response token i.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tqppo.errors import QueueError


class Kind(str, Enum):
    SEQUENCE = "sequence"  # one entry per token of prompt and response: [S, *trailing]
    RESPONSE = "response"  # one entry per response token: [R, *trailing]
    ROW = "row"  # one value per row: [*trailing]
    RAGGED = "ragged"  # its own length per row, such as image patches: [L, *trailing]
    JSON = "json"  # small non-tensor data


@dataclass(frozen=True, slots=True)
class Column:
    """One named field of a row. `trailing` holds None where a size is known only from the data."""

    name: str
    kind: Kind
    dtype: str = "float32"
    trailing: tuple[int | None, ...] = ()
    ragged_dim: int = 0  # which dimension of a row's tensor varies: 1 for position ids (k, S)
    neutral: float | int | bool | None = 0  # what padding rows hold; None: padding rows lack the column
    writer: str = ""
    readers: tuple[str, ...] = ()


_ALL = ("actor", "critic", "reference", "reward_model")
_UPDATES = ("actor", "critic")

_DECLARED: dict[str, Column] = {}


def declare(column: Column) -> Column:
    """Add a column; declaring the same one twice is fine, a different one under the same name is not."""
    known = _DECLARED.setdefault(column.name, column)
    if known != column:
        raise QueueError(f"column {column.name!r} is declared already, as {known}")
    return column


def column(name: str) -> Column:
    try:
        return _DECLARED[name]
    except KeyError:
        raise QueueError(
            f"column {name!r} is not declared; declare it with tqppo.columns.declare(Column({name!r}, …))"
        ) from None


def declared() -> dict[str, Column]:
    return dict(_DECLARED)


def custom() -> tuple[Column, ...]:
    """What was declared besides our own; queue handles carry these to other processes."""
    return tuple(column for name, column in _DECLARED.items() if name not in _OWN)


def _declare_own() -> None:
    sequence, response, row = Kind.SEQUENCE, Kind.RESPONSE, Kind.ROW
    own = [
        Column("tokens", sequence, "int64", writer="rollout", readers=(*_ALL, "teachers")),
        Column("response_mask", response, "bool", neutral=False, writer="rollout", readers=("everyone",)),
        Column("rollout_logprobs", response, writer="rollout", readers=("estimator", "actor")),
        Column("reward", row, writer="rollout", readers=("estimator",)),
        Column("model_score", row, writer="reward_model", readers=("estimator",)),
        Column("baseline_reward", row, writer="rollout", readers=("estimator",)),
        # (k, S), for models that want more than a token's place, which needs no column
        Column("position_ids", sequence, "int64", trailing=(None,), ragged_dim=1, writer="rollout", readers=_ALL),
        Column("routed_experts", sequence, "int16", trailing=(None, None), writer="rollout", readers=("actor",)),
        Column("teacher_ids", sequence, "int32", trailing=(None,), writer="teachers", readers=("actor",)),
        Column("teacher_logprobs", sequence, trailing=(None,), writer="teachers", readers=("actor",)),
        Column("old_logprobs", response, writer="actor", readers=("estimator", "actor")),
        Column("ref_logprobs", response, writer="reference", readers=("estimator", "actor")),
        Column("values", response, writer="critic", readers=("estimator", "critic")),
        Column("advantages", response, writer="estimator", readers=("actor",)),
        Column("returns", response, writer="estimator", readers=("critic",)),
        Column("correction_weights", response, neutral=0, writer="estimator", readers=("actor",)),
        Column("loss_mask", response, "bool", neutral=False, writer="estimator", readers=_UPDATES),
        Column("session_weight", row, writer="estimator", readers=_UPDATES),
        Column("extra", Kind.JSON, neutral=None, writer="rollout", readers=("estimator",)),
    ]
    for each in own:
        declare(each)


_declare_own()
_OWN = frozenset(_DECLARED)
