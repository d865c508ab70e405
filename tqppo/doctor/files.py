"""Looks whether the files and folders that a config names are there, without reading them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tqppo import tables
from tqppo.builtin import NO_FILE
from tqppo.config.checks.registry import Context
from tqppo.config.diagnostics import Diagnostic, in_order
from tqppo.config.facts import named_models
from tqppo.data.files import missing
from tqppo.data.recipes import command_for

if TYPE_CHECKING:
    from tqppo.config.compilation import Compilation


def missing_files(compilation: Compilation) -> list[Diagnostic]:
    """A warning for each: a config may be written before its data is there, and `train` finds out anyway."""
    context = Context(compilation.draft, compilation.origins)
    return in_order([*_data(context), *_code(context), *_models(context)])


def _data(context: Context) -> Iterator[Diagnostic]:
    for key in ("data.train", "validation.data", "warm_start.data"):
        for source in _texts(context.value(key)):
            if source and not source.startswith(NO_FILE) and not tables.expand(source):
                yield context.report("W623", missing(source), (key,), found=f'"{source}"', fix=_way_to(source))


def _way_to(source: str) -> str:
    """How to get a data file: the command that makes it, if there is one."""
    if command := command_for(Path(source)):
        return f"make it with `{command}`"
    return "make the file, or correct the path: in a TOML file of yours it is relative to that file"


def _code(context: Context) -> Iterator[Diagnostic]:
    for key in ("reward.function", "rollout.agent"):
        for each in _texts(context.value(key)):
            place = each.rpartition(":")[0]
            if place.endswith(".py") and not Path(place).expanduser().is_file():
                message = f"there is no file {place}; looked for {Path(place).expanduser().absolute()}"
                fix = "correct the path: in a TOML file it is relative to that file"
                yield context.report("W623", message, (key,), found=f'"{each}"', fix=fix)


def _models(context: Context) -> Iterator[Diagnostic]:
    """Models that are written as folders; other names may be on a hub."""
    config = context.config
    keys = ["model.path", "model.tokenizer", "critic.path", "reference.path", "reward_model.path"]
    for key in [*keys, *(f"teachers.{name}.path" for name in named_models(config))]:
        path = str(context.value(key))
        if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
            message = f"there is no folder {path}; looked for {Path(path).expanduser().absolute()}"
            yield context.report("W623", message, (key,), found=f'"{path}"', fix="correct the path")


def _texts(value: object) -> list[str]:
    return [value] if isinstance(value, str) else [str(each) for each in value] if isinstance(value, list) else []
