"""Names of the tasks, rewards and agent loops that come with tqppo. Imports no torch.

The config's checks look names up here, and the rooms that implement them build on the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from tqppo.errors import ConfigError, UsageError

TASKS: dict[str, dict[str, int | str]] = {  # task → its arguments with their defaults
    "sort": {"digits": 4},
    "reverse": {"length": 4, "letters": "abcdefghij"},
    "add": {"digits": 2},
    "arithmetic": {"terms": 3, "largest": 9, "operators": "+-*"},
    "count": {"length": 8, "letters": "abc"},
    "maximum": {"numbers": 3, "digits": 2},
    "lookup": {},
}
TASK = "task:"  # begins the name of a task, as a data source or as the path of a tiny teacher
PROCEDURAL = (TASK, "gym:")  # begin the names of data sources that generate their rows
NO_FILE = (*PROCEDURAL, "hub:")  # begin the names of data sources that are neither files nor patterns
REWARDS = (
    "task",
    "exact_match",
    "partial_match",
    "contains",
    "gsm8k",
    "matches",
    "math",
    "gym",
    "length",
    "json_schema",
    "code",
)
AGENTS = ("single_turn", "tools", "rewrite", "environment")
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "xml", "tiny")
OnToolError = Literal["show", "end", "fail"]
AnswerScope = Literal["last_turn", "response"]
HowToRewrite = Literal["truncate", "summarise"]


def is_procedural(source: str) -> bool:
    """Whether a data source generates its rows, so that it has a held-out part."""
    return source.startswith(PROCEDURAL)


class Argument(NamedTuple):
    """An argument of an agent loop: whether a value fits, and in words what would."""

    fits: Callable[[object], bool]
    wanted: str


def _whole(least: int) -> Argument:
    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Argument(fits, f"a whole number from {least}")


def _number(*, or_zero: bool = False) -> Argument:
    def fits(value: object) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (value > 0 or (or_zero and value == 0))  # type: ignore[operator]

    return Argument(fits, "a positive number or 0" if or_zero else "a positive number")


def _one_of(choices: Iterable[str]) -> Argument:
    allowed = tuple(choices)
    return Argument(lambda value: value in allowed, " or ".join(allowed))


def _are_paths(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str) for each in value)


_TEXT = Argument(lambda value: isinstance(value, str) and bool(value), "a text")
_TABLE = Argument(lambda value: isinstance(value, Mapping), "a table")
_TOOLS = {
    "tools": Argument(_are_paths, 'a list of functions, such as ["tools.py:calculate"]'),
    "parser": _one_of(TOOL_PARSERS),
    "max_turns": _whole(1),
    "max_calls": _whole(1),
    "timeout_s": _number(),
    "workers": _whole(1),
    "max_output_chars": _whole(1),
    "memory_gb": _number(or_zero=True),
    "on_tool_error": _one_of(get_args(OnToolError)),
    "answer": _one_of(get_args(AnswerScope)),
    "template_args": _TABLE,
}
AGENT_ARGUMENTS: dict[str, dict[str, Argument]] = {  # agent loop → what `rollout.agent_args` may hold
    "tools": _TOOLS,
    "rewrite": {
        **_TOOLS,
        "how": _one_of(get_args(HowToRewrite)),
        "keep_turns": _whole(0),
        "above_tokens": _whole(0),
        "question": _TEXT,
    },
    "environment": {
        "environment": _TEXT,
        "args": _TABLE,
        "max_turns": _whole(1),
        "timeout_s": _number(),
        "workers": _whole(1),
        "role": _TEXT,
        "template_args": _TABLE,
    },
}
DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


def check_agent_arguments(agent: str, given: Mapping[str, object]) -> None:
    """Raises ConfigError for a value that does not fit. Arguments that are not listed are left to others."""
    for name, argument in AGENT_ARGUMENTS[agent].items():
        if name in given and not argument.fits(given[name]):
            raise ConfigError(f"rollout.agent_args.{name} = {given[name]!r} should be {argument.wanted}")


def task_arguments(name: str) -> dict[str, int | str | bool]:
    """Every argument of a task with its default. `partial_credit` is an argument of all tasks."""
    if name not in TASKS:
        raise UsageError(f"there is no task called {name!r}; tasks: {', '.join(TASKS)}")
    return {**TASKS[name], "partial_credit": False}


def check_task_arguments(name: str, given: Mapping[str, object]) -> None:
    """Raises UsageError for an unknown argument, and for a value of the wrong type or out of range."""
    allowed = task_arguments(name)
    for key, value in given.items():
        if key not in allowed:
            raise UsageError(f"task {name!r} has no argument {key!r}; arguments: {', '.join(allowed)}")
        if type(value) is not type(allowed[key]):
            wanted = type(allowed[key]).__name__
            raise UsageError(f"task {name!r}: {key} = {value!r} should be of type {wanted}, such as {allowed[key]!r}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UsageError(f"task {name!r}: {key} = {value} should be at least 1")
        if value == "":
            raise UsageError(f"task {name!r}: {key} must not be empty")
