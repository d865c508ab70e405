"""Compiles a config: reads the layers, validates every value, merges them with their origins, checks the result.

One pass reports all problems. A user's mistake never raises: look at `Compilation.ok`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqppo.config.checks.run import run_checks
from tqppo.config.compilation import Compilation, Origin
from tqppo.config.diagnostics import Diagnostic, in_order
from tqppo.config.read.assignment import KeyAssignment, SettingsLayer
from tqppo.config.read.layers import read_layers
from tqppo.config.read.paths import rebased
from tqppo.config.read.unset import is_unset, unknown_unset
from tqppo.config.read.validate import AssignmentValidator
from tqppo.config.sections import Config


def compile_config(
    preset: str | None = None,
    config_files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    unset: Sequence[str] = (),
) -> Compilation:
    """Later wins: defaults, the preset (after what it extends), files, TQPPO__SECTION__KEY, `--set` arguments.

    What layers before `--set` say of a key in `unset` does not count.
    """
    environ = os.environ if environ is None else environ
    layers, problems = read_layers(preset, [Path(each) for each in config_files], overrides, environ)
    validator = AssignmentValidator([*problems, *unknown_unset(unset)])
    if any(each.severity == "error" for each in problems):
        validator.unresolved.add("*")  # a layer is missing or broken, and may have set any key
    merged: dict[str, object] = {}
    origins: dict[str, list[Origin]] = {}
    for number, layer in enumerate(layers):
        for one in validator.valid(layer):
            if layer.kind != "set" and is_unset(one.path, unset):
                continue
            one = one if layer.folder is None else rebased(one, layer.folder)
            _merge(merged, one.path, one.value)
            origins.setdefault(_dotted(one.path), []).append(_origin(one, layer, number))
    _fill_missing_paths(merged, validator, layers)
    draft = Config.model_validate(merged)
    chains = {key: tuple(chain) for key, chain in origins.items()}
    found = in_order([*validator.problems, *run_checks(draft, chains, frozenset(validator.unresolved))])
    draft = _without(merged, draft, [each.key for each in found if each.code == "W303"])
    return Compilation(draft, found, chains, _name(preset, config_files))


def _merge(merged: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Set a value. Tables merge, everything else is replaced."""
    table = merged
    for part in path[:-1]:
        table = _subtable(table, part)
    present = table.get(path[-1])
    if isinstance(value, dict) and isinstance(present, dict):
        for name, inner in value.items():
            _merge(present, (name,), inner)
    else:
        table[path[-1]] = value


def _subtable(table: dict[str, object], name: str) -> dict[str, object]:
    """The table of that name, created if there is none."""
    inner = table.get(name)
    if isinstance(inner, dict):
        return inner
    created: dict[str, object] = {}
    table[name] = created
    return created


def _without(merged: dict[str, object], draft: Config, ineffective: list[str]) -> Config:
    """The config without settings that a later layer made ineffective.

    The resolved config is written to one file, and there they would be errors.
    """
    for key in ineffective:
        section, _, name = key.partition(".")
        _subtable(merged, section).pop(name, None)
    if any(key.startswith("teachers.") for key in ineffective):
        merged.pop("teachers", None)
    return Config.model_validate(merged) if ineffective else draft


def _name(preset: str | None, files: Sequence[Path | str]) -> str:
    if preset:
        return Path(preset).name.removesuffix(".toml")  # a built-in name such as grpo-0.5b has a dot of its own
    return Path(files[-1]).stem if files else "config"


def _dotted(path: tuple[str, ...]) -> str:
    """A path as a dotted key; names that TOML would quote are quoted."""
    return ".".join(part if part.replace("-", "_").isidentifier() or part.isalnum() else f'"{part}"' for part in path)


def _origin(one: KeyAssignment, layer: SettingsLayer, number: int) -> Origin:
    place = str(one.key_span)
    if layer.kind == "set":
        place = f"--set {one.key_span.text}"
    elif layer.kind == "environment":
        place = one.key_span.text
    return Origin(one.value, layer.kind, place, number, one.key_span, one.value_span)


def _fill_missing_paths(merged: dict[str, object], validator: AssignmentValidator, layers: list[SettingsLayer]) -> None:
    """Report teachers without a path, the one setting that has no default, and fill in a placeholder."""
    for name in _subtable(merged, "teachers") if "teachers" in merged else ():
        teacher = _subtable(_subtable(merged, "teachers"), name)
        if "path" not in teacher:
            _report_missing_path(name, validator, layers)
            teacher["path"] = "?"


def _report_missing_path(name: str, validator: AssignmentValidator, layers: list[SettingsLayer]) -> None:
    """Report a missing path, unless it was set to an invalid value: that is reported already."""
    key = f"teachers.{name}.path"
    if not {key, "teachers.*", "*"} & validator.unresolved:
        headers = [layer.document.key_spans.get(("teachers", name)) for layer in layers if layer.document]
        at = next((each for each in reversed(headers) if each), None)
        fix = f'add path = "…" below [teachers.{name}]: a folder or a hub name'
        validator.problems.append(Diagnostic("error", "E106", f"{key} is missing", at, key, found="nothing", fix=fix))
    validator.unresolved.add(key)
