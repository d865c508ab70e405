"""Tasks, their arguments, data files and reward functions are named correctly."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.builtin import DATA_FILES, REWARDS, TASKS, check_task_arguments, task_arguments
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import data_sources
from tqppo.config.read.nearest import did_you_mean, nearest
from tqppo.errors import TqppoError


@check("data.train", "validation.data", names=True)
def data_sources_exist(context: Context) -> Iterator[Diagnostic]:
    for key in ("data.train", "validation.data"):
        value = context.value(key)
        for each in [value] if isinstance(value, str) else value:
            yield from _data_name(context, key, each)
    if not data_sources(context.config) or data_sources(context.config) == [""]:
        fix = 'write data.train = "task:sort", or the path of a file'
        yield context.report("E409", "data.train is empty: there is nothing to train on", ("data.train",), fix=fix)


def _data_name(context: Context, key: str, each: str) -> Iterator[Diagnostic]:
    kind, colon, name = each.partition(":")
    if kind == "task" and colon and name not in TASKS:
        close = nearest(name, TASKS, limit=1)
        yield context.report(
            "E409",
            f'there is no task called "{name}"',
            (key,),
            allowed=", ".join(f"task:{known}" for known in TASKS),
            fix=f'did you mean "task:{close[0]}"?' if close else "see the README's list of tasks",
        )
    elif each and kind not in ("task", "gym") and not each.endswith(DATA_FILES):
        fix = f'did you mean "task:{each}"?' if each in TASKS else "convert it to JSONL or parquet"
        message = f'{key}: "{each}" is neither a task nor a file that can be read'
        allowed = f"task:NAME, gym:NAME, or a file that ends in {', '.join(DATA_FILES)}"
        yield context.report("E411", message, (key,), found=f'"{each}"', allowed=allowed, fix=fix)


@check("data.train", "data.task_args")
def task_takes_its_arguments(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    names = [each.partition(":")[2] for each in data_sources(config) if each.startswith("task:")]
    for name in names:
        if name not in TASKS or not config.data.task_args:
            continue
        known = list(task_arguments(name))
        unknown = [each for each in config.data.task_args if each not in known]
        for each in unknown:
            key, fix = f"data.task_args.{each}", did_you_mean(each, known)
            message, keys = f'the task {name} has no argument called "{each}"', (key, "data.train")
            yield context.report("E410", message, keys, found=each, allowed=", ".join(known), fix=fix, on_key=True)
        if not unknown:
            yield from _task_values(context, name)


def _task_values(context: Context, name: str) -> Iterator[Diagnostic]:
    try:
        check_task_arguments(name, context.config.data.task_args)
    except TqppoError as error:
        yield context.report("E410", str(error), ("data.task_args", "data.train"))


@check("reward.function", names=True)
def reward_exists(context: Context) -> Iterator[Diagnostic]:
    name = context.config.reward.function
    if name and ":" not in name and name not in REWARDS:
        yield context.report(
            "E416",
            f'there is no reward function called "{name}"',
            ("reward.function",),
            allowed=", ".join(REWARDS) + ', or your own as "module:function" or "file.py:function"',
            fix=did_you_mean(name, REWARDS) or f'write "{name}:function" if {name} is a module of yours',
        )
