"""Compiles a config: reads the layers, judges every value, merges them with their origins, checks the whole.

One pass reports all problems. Nothing here raises for a user's mistake: look at `Compilation.ok`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqppo.config.diagnostics import Diagnostic, Span, in_order
from tqppo.config.read.layers import Layer, Written, read_layers

if TYPE_CHECKING:
    from tqppo.config.sections import Config


@dataclass(frozen=True, slots=True)
class Origin:
    """A value of a key, and who said so. `layer` counts from 0; defaults are -1."""

    value: Any
    kind: str  # default, preset, config, environment or set
    place: str  # file:line:column, or the text that was typed
    layer: int
    key_span: Span | None = None
    span: Span | None = None

    def __str__(self) -> str:
        return self.place if self.kind != "default" else "default"


@dataclass(frozen=True, slots=True)
class Compilation:
    """What came out. `draft` is the config with every mistaken value left out; `config` only when all is well."""

    draft: Config
    diagnostics: list[Diagnostic]
    origins: dict[str, tuple[Origin, ...]]  # of keys that somebody set: oldest first, the last one holds
    layers: list[Layer] = field(default_factory=list)
    name: str = "config"

    @property
    def ok(self) -> bool:
        return all(each.severity != "error" for each in self.diagnostics)

    @property
    def config(self) -> Config | None:
        return self.draft if self.ok else None


def compile_config(
    preset: str | None = None,
    config_files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Compilation:
    """Later wins: defaults, the preset (after what it extends), files, TQPPO__SECTION__KEY, `--set` arguments."""
    environ = os.environ if environ is None else environ
    layers, problems = read_layers(preset, [Path(each) for each in config_files], overrides, environ)

    from tqppo.config.checks.registry import run_checks
    from tqppo.config.read.judge import Judge

    judge = Judge(problems)
    if any(each.severity == "error" for each in problems):
        judge.doubtful.add("*")  # a layer is missing or broken: say nothing about values that it may have set
    merged: dict[str, Any] = {}
    origins: dict[str, list[Origin]] = {}
    for number, layer in enumerate(layers):
        for written in judge.accepted(layer):
            _place(merged, written)
            origins.setdefault(_key(written.path), []).append(_origin(written, layer, number))
    draft = _build(merged, judge, layers)
    chains = {key: tuple(chain) for key, chain in origins.items()}
    found = in_order([*judge.problems, *run_checks(draft, chains, frozenset(judge.doubtful))])
    draft = _without(merged, draft, [each.key for each in found if each.code == "W303"])
    return Compilation(draft, found, chains, layers, _name(preset, config_files))


def _without(merged: dict[str, Any], draft: Config, void: list[str]) -> Config:
    """The config without settings that a later layer made void, so that what is written down is what counts:
    in one file they would be contradictions."""
    for key in void:
        section, _, name = key.partition(".")
        merged.get(section, {}).pop(name, None)
    if any(key.startswith("teachers.") for key in void):
        merged.pop("teachers", None)
    return type(draft).model_validate(merged) if void else draft


def _name(preset: str | None, files: Sequence[Path | str]) -> str:
    return Path(preset).stem if preset else (Path(files[-1]).stem if files else "config")


def _key(path: tuple[str, ...]) -> str:
    """A path as a dotted key; names that TOML would quote are quoted."""
    return ".".join(part if part.replace("-", "_").isidentifier() or part.isalnum() else f'"{part}"' for part in path)


def _origin(written: Written, layer: Layer, number: int) -> Origin:
    place = str(written.key)
    if layer.kind == "set":
        place = f"--set {written.key.text}"
    elif layer.kind == "environment":
        place = written.key.text
    return Origin(written.value, layer.kind, place, number, written.key, written.at)


def _place(merged: dict[str, Any], written: Written) -> None:
    """Tables merge, everything else is replaced."""
    table = merged
    for part in written.path[:-1]:
        inner = table.get(part)
        table[part] = inner if isinstance(inner, dict) else {}
        table = table[part]
    last, value = written.path[-1], written.value
    if isinstance(value, dict) and isinstance(table.get(last), dict):
        for inner_name, inner_value in value.items():
            _place(table[last], Written((inner_name,), inner_value, written.key, written.at))
    else:
        table[last] = value


def _build(merged: dict[str, Any], judge: Any, layers: list[Layer]) -> Config:
    from tqppo.config.sections import Config

    for name, teacher in merged.get("teachers", {}).items():
        if "path" not in teacher:
            _missing_path(name, judge, layers)
            teacher["path"] = "?"
    return Config.model_validate(merged)


def _missing_path(name: str, judge: Any, layers: list[Layer]) -> None:
    """The one key without a default; silent when it was tried, and a message tells of that already."""
    key = f"teachers.{name}.path"
    if not {key, "teachers.*", "*"} & judge.doubtful:
        headers = [layer.document.keys.get(("teachers", name)) for layer in layers if layer.document]
        at = next((each for each in reversed(headers) if each), None)
        fix = f'add path = "…" below [teachers.{name}]: a folder or a hub name'
        judge.problems.append(Diagnostic("error", "E106", f"{key} is missing", at, key, found="nothing", fix=fix))
    judge.doubtful.add(key)
