"""The sources of a config, in order: the preset with its bases, files, the environment, `--set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read.assignment import SettingsLayer
from tqppo.config.read.files import FileReader
from tqppo.config.read.overrides import ENV_PREFIX, environment_layer, misspelt_variables, override_layer


def read_layers(
    preset: str | None, files: Sequence[Path], overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[SettingsLayer], list[Diagnostic]]:
    """All layers that can be read, and the problems of those that cannot."""
    reader = FileReader(environ)
    if preset is not None:
        reader.preset(preset)
    for path in files:
        reader.file(Path(path), "config")
    if any(name.upper().startswith(ENV_PREFIX) for name in environ):
        reader.layers.append(environment_layer(environ))
    layer, problems = override_layer(overrides)
    return [*reader.layers, layer], [*reader.problems, *misspelt_variables(environ), *problems]
