"""Tasks, their arguments, data files and reward functions are named correctly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tqppo.builtin import DATA_FILES, NO_FILE, REWARDS, TASK, TASKS, check_task_arguments, task_arguments
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import data_sources
from tqppo.config.read.nearest import did_you_mean, nearest
from tqppo.config.sections import Config
from tqppo.errors import TqppoError


@check("data.train", "validation.data", "warm_start.data", names=True)
def data_sources_exist(context: Context) -> Iterator[Diagnostic]:
    for key in ("data.train", "validation.data", "warm_start.data"):
        value = context.value(key)
        for each in [value] if isinstance(value, str) else value:
            yield from _data_name(context, key, each)
    if not data_sources(context.config) or data_sources(context.config) == [""]:
        fix = 'write data.train = "task:sort", or the path of a file'
        yield context.report("E409", "data.train is empty: there is nothing to train on", ("data.train",), fix=fix)


def _data_name(context: Context, key: str, each: str) -> Iterator[Diagnostic]:
    name = each.removeprefix(TASK)
    if each.startswith(TASK) and name not in TASKS:
        close = nearest(name, TASKS, limit=1)
        yield context.report(
            "E409",
            f'there is no task called "{name}"',
            (key,),
            allowed=", ".join(f"task:{known}" for known in TASKS),
            fix=f'did you mean "task:{close[0]}"?' if close else "write one of them, or the path of a file",
        )
    elif each and not each.startswith(NO_FILE) and not each.endswith(DATA_FILES):
        message = f'{key}: "{each}" is neither a task nor a file that can be read'
        allowed = f"task:NAME, gym:NAME, hub:NAME, or a file that ends in {', '.join(DATA_FILES)}"
        yield context.report("E411", message, (key,), found=f'"{each}"', allowed=allowed, fix=_other_name(each))


def _other_name(each: str) -> str:
    """What the name of no file may stand for."""
    written = Path(each).name if Path(each).name in TASKS else each  # a file's value has its folder in front
    if written in TASKS:
        return f'did you mean "task:{written}"?'
    if Path(each).is_dir():
        return f'name the files in the folder: "{each}/*.jsonl"'
    if re.fullmatch(r"[\w.-]+/[\w.-]+", each):
        return f'for a dataset of the hub write "hub:{each}"; a file needs its ending'
    return "convert it to JSONL or parquet"


@check("data.train", "data.weights")
def every_source_has_its_weight(context: Context) -> Iterator[Diagnostic]:
    sources, weights = data_sources(context.config), context.config.data.weights
    if weights and (len(weights) != len(sources) or len(sources) < 2):
        wanted = f"{len(sources)} weights" if len(sources) > 1 else "no weights: there is one source"
        equal = ", ".join(["1"] * len(sources))
        yield context.report(
            "E431",
            f"data.weights has {len(weights)} weights, and data.train has {len(sources)} sources",
            ("data.weights", "data.train"),
            allowed=wanted,
            fix=f"set data.weights = [{equal}]" if len(sources) > 1 else "delete data.weights",
        )


@check("data.train", "data.task_args")
def task_takes_its_arguments(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    names = [each.removeprefix(TASK) for each in data_sources(config) if each.startswith(TASK)]
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
    for name in reward_functions(context.config):
        if name and ":" not in name and name not in REWARDS:
            yield context.report(
                "E416",
                f'there is no reward function called "{name}"',
                ("reward.function",),
                allowed=", ".join(REWARDS) + ', or your own as "module:function" or "file.py:function"',
                fix=did_you_mean(name, REWARDS) or f'write "{name}:function" if {name} is a module of yours',
            )


@check("reward.function", "reward.weights", "reward.function_args")
def every_reward_has_its_weight_and_arguments(context: Context) -> Iterator[Diagnostic]:
    names, reward = reward_functions(context.config), context.config.reward
    if reward.weights and len(reward.weights) != len(names):
        yield context.report(
            "E432",
            f"reward.weights has {len(reward.weights)} weights, and reward.function names {len(names)}",
            ("reward.weights", "reward.function"),
            allowed=f"{len(names)} weights",
            fix=f"set reward.weights = [{', '.join(['1.0'] * len(names))}]",
        )
    labels = [name.rpartition(":")[2] for name in names]
    if len(names) < 2 or not reward.function_args:
        return
    for label, value in reward.function_args.items():
        if label not in labels or not isinstance(value, dict):
            yield context.report(
                "E433",
                "with several reward functions, reward.function_args has a table for each of them",
                (f"reward.function_args.{label}", "reward.function"),
                found=label,
                allowed=", ".join(f"{each} = {{ … }}" for each in labels),
                fix=f"write function_args = {{ {labels[0]} = {{ {label} = … }} }}",
                on_key=True,
            )


def reward_functions(config: Config) -> list[str]:
    function = config.reward.function
    return [function] if isinstance(function, str) else list(function)
