"""The tables of built-in names agree with what implements them."""

from __future__ import annotations

import inspect

import pytest

from tqppo import builtin
from tqppo.data import tasks
from tqppo.errors import UsageError
from tqppo.rewards.functions import BUILT_IN
from tqppo.rollout.loops import base as loops
from tqppo.rollout.loops.environment import EnvironmentLoop
from tqppo.rollout.loops.rewrite import RewriteLoop
from tqppo.rollout.loops.tools import ToolLoop
from tqppo.rollout.tools.parsers import PARSERS


@pytest.mark.parametrize("name", builtin.TASKS)
def test_a_task_takes_the_arguments_that_its_table_lists(name: str) -> None:
    parameters = inspect.signature(tasks.TASKS[name]).parameters
    assert list(parameters) == list(builtin.TASKS[name])
    assert all(each.default is inspect.Parameter.empty for each in parameters.values())  # defaults are in the table
    assert tasks.load(name).problem(0).answer


def test_every_task_and_reward_is_implemented_and_listed() -> None:
    assert list(tasks.TASKS) == list(builtin.TASKS)
    assert list(BUILT_IN) == list(builtin.REWARDS)


def test_agent_loops_are_listed_with_their_arguments() -> None:
    assert list(loops.BUILT_IN) == list(builtin.AGENTS)
    for name, loop in {"tools": ToolLoop, "rewrite": RewriteLoop, "environment": EnvironmentLoop}.items():
        assert list(inspect.signature(loop).parameters) == list(builtin.AGENT_ARGUMENTS[name])
    assert list(builtin.TOOL_PARSERS) == ["auto", *PARSERS]


def test_task_arguments_are_checked_by_name_type_and_range() -> None:
    builtin.check_task_arguments("sort", {"digits": 5, "partial_credit": True})
    wrong: dict[str, object]
    for wrong, message in (
        ({"digit": 4}, "has no argument 'digit'"),
        ({"digits": "four"}, "should be of type int"),
        ({"digits": True}, "should be of type int"),
        ({"digits": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            builtin.check_task_arguments("sort", wrong)
    with pytest.raises(UsageError, match="must not be empty"):
        builtin.check_task_arguments("reverse", {"letters": ""})
    with pytest.raises(UsageError, match="there is no task called 'sorting'"):
        builtin.check_task_arguments("sorting", {})


def test_tasks_and_gyms_generate_their_rows_and_files_do_not() -> None:
    sources = ("task:sort", "gym:chain_sum", "hub:openai/gsm8k", "task.jsonl", "task")
    assert [builtin.is_procedural(each) for each in sources] == [True, True, False, False, False]
