"""Names of the tasks, rewards and agent loops that come with tqppo. Imports no torch.

The config's checks look names up here, and the rooms that implement them build on the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from tqppo.errors import UsageError

TASKS: dict[str, dict[str, int | str]] = {  # task → its arguments with their defaults
    "sort": {"digits": 4},
    "reverse": {"length": 4, "letters": "abcdefghij"},
    "add": {"digits": 2},
    "arithmetic": {"terms": 3, "largest": 9, "operators": "+-*"},
    "count": {"length": 8, "letters": "abc"},
    "maximum": {"numbers": 3, "digits": 2},
    "lookup": {},
}
REWARDS = ("task", "exact_match", "partial_match", "contains", "gsm8k", "matches", "math", "gym")
AGENTS = ("single_turn", "tools", "rewrite", "environment")
_TOOLS = (
    "tools",
    "parser",
    "max_turns",
    "max_calls",
    "timeout_s",
    "workers",
    "max_output_chars",
    "memory_gb",
    "on_tool_error",
    "answer",
    "template_args",
)
AGENT_ARGUMENTS = {  # agent loop → what `rollout.agent_args` may hold
    "tools": _TOOLS,
    "rewrite": (*_TOOLS, "how", "keep_turns", "above_tokens", "question"),
    "environment": ("environment", "args", "max_turns", "timeout_s", "workers", "role", "template_args"),
}
DATA_FILES = (".jsonl", ".ndjson", ".parquet")


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
