"""The columns and tags of a row, declared once: name, kind, dtype, shape, neutral value. Imports no torch.

`dataflow` says which stage reads and writes which column.

A row is one trajectory: a sequence of S = P + R tokens, prompt then response. A model's output at
position t scores token t + 1; response columns have R entries, entry i belonging to response token i.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

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
    """Columns that others declared besides those of tqppo; queue handles carry them to other processes."""
    return tuple(column for name, column in _DECLARED.items() if name not in _OWN)


def _declare_own() -> None:
    sequence, response, row = Kind.SEQUENCE, Kind.RESPONSE, Kind.ROW
    own = [
        Column("tokens", sequence, "int64"),
        Column("response_mask", response, "bool", neutral=False),
        Column("rollout_logprobs", response),
        Column("reward", row),
        Column("model_score", row),
        Column("baseline_reward", row),
        # What a row's teacher says of token t + 1 stands in row t. Only rows P - 1 … S - 2 count; the others are 0.
        Column("teacher_ids", sequence, "int32", trailing=(None,)),  # its K likeliest tokens
        Column("teacher_logprobs", sequence, trailing=(None,)),  # of those; without teacher_ids of token t + 1 alone
        Column("teacher_hidden", sequence, "any", trailing=(None,)),  # input of its output head; 0 beyond its own size
        Column("teacher_index", row, "int64"),  # place of the row's teacher among those of the config
        Column("turn_ends", Kind.RAGGED, "int64"),  # response tokens up to the end of each turn
        Column("turn_rewards", Kind.RAGGED),
        Column("turn_anchors", Kind.RAGGED, "int64"),  # hash of the state that each turn began in
        Column("old_logprobs", response),
        Column("sum_pi_squared", response),  # Σ p² over the vocabulary, of the old policy
        Column("ref_logprobs", response),
        Column("values", response),
        Column("advantages", response),
        Column("returns", response),
        Column("correction_weights", response, neutral=0),
        Column("loss_mask", response, "bool", neutral=False),
        Column("session_weight", row),
    ]
    for each in own:
        declare(each)


_declare_own()
_OWN = frozenset(_DECLARED)


class RowIdentity(TypedDict):
    """Where a row belongs, and how long it is."""

    uid: str  # of the prompt
    session: int
    trajectory: int
    prompt_len: int
    response_len: int
    seq_len: int


class RowTags(RowIdentity, total=False):
    """What the driver knows about a row. Rows carry these tags besides their columns."""

    order: int  # of the prompt within its step
    reward: float
    finish: str
    turns: int
    weight_version: int
    source: str  # of the prompt's dataset
    extra: dict[str, float]  # further numbers of the reward function
    metrics: dict[str, float]  # of the trajectory, by its agent loop
    counts: dict[str, float]  # of the session, on its last row: tool calls and the like
    baseline: float  # reward of the prompt's greedy session
    is_padding: bool
    answer: str  # validation only: what the row answered, cut to a few characters
    last: bool  # validation only: whether this is the session's last trajectory
    teacher: str  # validation with teachers only, of sampled rows: the teacher that was asked
    teacher_kl: float  # the sum of log q - log p over the tokens that the student sampled
    teacher_tokens: int  # the number of these tokens


class PromptTags(TypedDict):
    """The marker of a prompt whose group is settled; its key is the prompt's uid."""

    is_prompt: bool
    status: str  # finished, failed or dropped
    order: int
    rows: int
    error: str  # of the first session that failed
    failed_sessions: int  # after their retries
    retries: int  # of its sessions, whether they helped or not


def rows_of_padding(num_rows: int, multiple: int) -> int:
    """Number of padding rows that fill a batch up to the next multiple."""
    return -num_rows % multiple
