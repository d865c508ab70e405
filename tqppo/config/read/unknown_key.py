"""Describes a key that does not exist: one of another tool, one of another section, or a misspelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read.assignment import KeyAssignment
from tqppo.config.read.flatten import walk
from tqppo.config.read.nearest import nearest
from tqppo.config.read.replacements import REMOVED, Replacement, replacement_of
from tqppo.config.schema import settings
from tqppo.config.sections import Config


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """The problem, and the keys that were probably meant: their values are not known."""

    problem: Diagnostic
    meant: tuple[str, ...] = ()


def unknown_key(one: KeyAssignment) -> UnknownKey:
    if one.path == ("extends",):
        fix = "use --preset NAME, or a --config file that extends it"
        return UnknownKey(_problem("E101", "extends works only in files", one, "extends", one.key_span.text, fix=fix))
    for path, known in _replacements(one) if not _is_misspelt_section(one.path) else ():
        return _replaced(one, ".".join(path), known)
    return _misspelt(one)


def _replacements(one: KeyAssignment) -> Iterator[tuple[tuple[str, ...], Replacement]]:
    for path, _ in [(one.path, None), *walk(one.path, one.value)]:
        known = replacement_of(path)
        if known is not None:
            yield path, known


def _replaced(one: KeyAssignment, key: str, known: Replacement) -> UnknownKey:
    sibling = f"{one.path[0]}.{known.key.rpartition('.')[2]}"  # critic.learning_rate is critic.lr, not actor.lr
    known = replace(known, key=sibling) if sibling in settings() else known
    if one.path[0] == "teachers" and len(one.path) > 1:
        known = replace(known, key=known.key.replace("*", one.path[1]))
    if known.tool == REMOVED:
        message, fix = f"{key} was removed", known.hint
    else:
        target = f" for {known.key}" if known.key else ""
        message = f"{key} is not a key of tqppo: it is {known.tool}'s name{target}"
        fix = "; ".join(each for each in (known.key and f"use {known.key}", known.hint) if each)
    return UnknownKey(_problem("E102", message, one, key, key, fix=fix), (known.key, f"{known.key}.*"))


def _misspelt(one: KeyAssignment) -> UnknownKey:
    name, *rest = one.path
    at_top = not rest or name not in Config.model_fields
    if at_top:
        wrong, prefix, siblings = name, "", list(Config.model_fields)
    else:
        depth = 2 if name == "teachers" and len(rest) > 1 else 1
        wrong, prefix = rest[depth - 1], ".".join(one.path[:depth]) + "."
        pattern = "teachers.*." if name == "teachers" else prefix
        siblings = [key.removeprefix(pattern) for key in settings() if key.startswith(pattern)]
    close = nearest(wrong, siblings)
    elsewhere = [key for key in settings() if key.rpartition(".")[2] == wrong] if not close else []
    if close:
        fix = f"did you mean {prefix}{close[0]}?"
    else:
        fix = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else "see `tqppo schema`, or delete it"
    if not at_top and isinstance(one.value, dict) and not close:
        fix = f"sections have no tables inside: write its keys below [{one.path[0]}]"
    what = "section" if at_top and (rest or isinstance(one.value, dict)) else "key"
    key, allowed = f"{prefix}{wrong}", ", ".join(sorted(siblings))
    problem = _problem("E101", f"unknown {what} {key}", one, key, key, allowed=allowed, fix=fix)
    sections = [f"{each}.*" for each in close if at_top]
    return UnknownKey(problem, (*(f"{prefix}{each}" for each in close), *sections, *elsewhere))


def _is_misspelt_section(path: tuple[str, ...]) -> bool:
    """Whether the section that was probably meant has the key, as in `[runn] seed`."""
    close = nearest(path[0], Config.model_fields, limit=1) if path[0] not in Config.model_fields else []
    return bool(close) and len(path) > 1 and ".".join((close[0], *path[1:2])) in settings()


def _problem(
    code: str, message: str, one: KeyAssignment, key: str, found: str, *, allowed: str = "", fix: str = ""
) -> Diagnostic:
    return Diagnostic("error", code, message, one.key_span, key, found, allowed, fix)
