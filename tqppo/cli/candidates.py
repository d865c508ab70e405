"""The words that Tab offers for values: presets, settings, runs, back ends. Looked up by parameter name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

Candidate = tuple[str, str]

PATHS = {"config"}


def presets(word: str, finished: list[str]) -> Iterator[Candidate]:
    from tqppo.config.presets import list_presets

    yield from ((preset.name, preset.summary) for preset in list_presets())


def settings(word: str, finished: list[str]) -> Iterator[Candidate]:
    """Sections first, then their keys, then values: the whole list at once would be two hundred lines."""
    from tqppo.cli import keys

    key, equals, _ = word.partition("=")
    section, dot, name = key.rpartition(".")
    known = keys.sections()
    fields = known.get(section.split(".")[0] if section.startswith("teachers.") else section, {})
    if equals:
        values = _plugins(key) or (fields[name].values if name in fields else ())
        yield from ((f"{key}={value}", "") for value in values)
    elif not dot:
        yield from ((f"{each}=", field.help) for each, field in known[""].items())
        yield from ((f"{each}.", "") for each in known if each)
    elif section != "teachers":  # teachers are named by the user
        yield from ((f"{section}.{each}=", field.help) for each, field in fields.items())


def dotted_keys(word: str, finished: list[str]) -> Iterator[Candidate]:
    """Whole keys, for `config explain`."""
    from tqppo.cli import keys

    for section, fields in keys.sections().items():
        for name, field in fields.items():
            yield (f"{section}.{name}" if section else name), field.help


def _plugins(key: str) -> list[str]:
    """Values that are not in the config's types: installed back ends."""
    section, _, name = key.rpartition(".")
    if name != "backend":
        return []
    from tqppo import plugins

    return plugins.names("storage" if section == "storage" else "rollout")


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
    from tqppo import engines

    yield from ((name, "") for name in engines.ENVIRONMENTS)


def formats(word: str, finished: list[str]) -> Iterator[Candidate]:
    yield from (("text", "for people"), ("json", "for programs"), ("github", "annotations on a pull request"))


def shells(word: str, finished: list[str]) -> Iterator[Candidate]:
    yield from ((name, "") for name in ("bash", "zsh", "fish"))


BY_PARAMETER: dict[str, Callable[[str, list[str]], Iterator[Candidate]]] = {
    "preset": presets,
    "first": presets,
    "second": presets,
    "overrides": settings,
    "key": dotted_keys,
    "run": runs,
    "checkpoint": runs,
    "kind": kinds,
    "backend": backends,
    "engine": engines,
    "format_": formats,
    "show_completion": shells,
    "install_completion": shells,
}
