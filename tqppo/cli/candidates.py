"""Completions of values: presets, settings, runs, back ends. Looked up by parameter name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

Candidate = tuple[str, str]

PATHS = {"config", "source", "data", "to", "folder", "copies", "out"}


def presets(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo.config.read.presets import list_presets

    yield from ((preset.name, preset.summary) for preset in list_presets())


def settings(word: str, finished: list[str]) -> Iterator[Candidate]:
    """Sections first, then their keys, then values; all keys at once would be two hundred lines."""
    from tqppo.config.show.keys import all_keys, values_of

    key, equals, _ = word.partition("=")
    section, dot, _ = key.rpartition(".")
    if equals:
        yield from ((f"{key}={value}", "") for value in values_of(key))
        yield from ((f"{key}={path}", "") for path in files_for(key, word.partition("=")[2]))
    elif not dot:
        yield from ((f"{each.name}=", each.doc) for each in all_keys() if "." not in each.name)
        yield from dict.fromkeys((each.name.split(".")[0] + ".", "") for each in all_keys() if "." in each.name)
    else:  # users name their teachers, and all teachers have the same settings
        known = "teachers.*" if section.startswith("teachers.") else section
        for each in all_keys():
            if each.name.rpartition(".")[0] == known:
                yield f"{section}.{each.name.rpartition('.')[2]}=", each.doc


def files_for(key: str, typed: str) -> Iterator[str]:
    """Files and folders for a setting that names one, beginning with what is typed."""
    from tqppo.config.read.paths import DATA, MODELS, OWN_CODE

    pattern = re.sub(r"^teachers\.[^.]+", "teachers.*", key)
    if pattern not in (*DATA, *MODELS, *OWN_CODE):
        return
    folder, slash, _ = typed.rpartition("/")
    place = Path(folder + slash or ".").expanduser()
    for each in sorted(place.iterdir()) if place.is_dir() else ():
        if not each.name.startswith("."):
            yield f"{folder}{slash}{each.name}{'/' if each.is_dir() else ''}"


def codes(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo.config.show.codes import MEANINGS

    yield from MEANINGS.items()


def datasets(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo.data.recipes import RECIPES

    yield from ((name, recipe.repository) for name, recipe in RECIPES.items())


def dotted_keys(word: str, finished: list[str]) -> Iterator[Candidate]:
    """Whole keys, for `config explain`."""
    from tqppo.config.show.keys import all_keys

    yield from ((each.name, each.doc) for each in all_keys())


def runs(word: str, finished: list[str]) -> Iterator[Candidate]:
    """Runs by name; their checkpoints as paths."""
    yield "latest", "the newest checkpoint there is"
    folder = Path(os.environ.get("TQPPO__RUN__DIR", "runs"))
    for checkpoints in sorted(folder.glob("*/checkpoints")):
        steps = sorted(each for each in checkpoints.iterdir() if each.name.startswith("step_"))
        if not steps:
            continue
        yield checkpoints.parent.name, f"from {steps[-1].name}"
        yield from ((str(step), "") for step in steps)


def kinds(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo import plugins

    yield from ((kind, "") for kind in plugins.KINDS)


def backends(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo import plugins

    if finished and finished[-1] in plugins.KINDS:
        yield from ((name, "") for name in plugins.names(finished[-1]))


def engines(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo.engines import environments as engines

    yield from ((name, "") for name in engines.ENVIRONMENTS)


def formats(word: str, finished: list[str]) -> Iterator[Candidate]:
    yield from (("text", "for people"), ("json", "for programs"), ("github", "annotations on a pull request"))


def shells(word: str, finished: list[str]) -> Iterator[Candidate]:
    yield from ((name, "") for name in ("bash", "zsh", "fish"))


BY_PARAMETER: dict[str, Callable[[str, list[str]], Iterator[Candidate]]] = {
    "preset": presets,
    "named": presets,
    "first": presets,
    "second": presets,
    "overrides": settings,
    "key": dotted_keys,
    "unset": dotted_keys,
    "settings": settings,
    "code": codes,
    "dataset": datasets,
    "run": runs,
    "checkpoint": runs,
    "kind": kinds,
    "backend": backends,
    "engine": engines,
    "format_": formats,
    "show_completion": shells,
    "install_completion": shells,
}
