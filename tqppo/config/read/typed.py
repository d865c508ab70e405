"""Values that do not stand in a file: `--set key=value`, and TQPPO__SECTION__KEY in the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqppo.config.diagnostics import Diagnostic, Span
from tqppo.config.read.layers import ENV_PREFIX, Layer, Written
from tqppo.config.read.spans import parse_key, parse_value


def override_layer(overrides: Sequence[str]) -> tuple[Layer, list[Diagnostic]]:
    """Each `--set` argument; what cannot be read as one is a problem at its place in the text."""
    layer, problems = Layer("set", "--set"), []
    for number, text in enumerate(overrides, 1):
        read = _override(text, number)
        if isinstance(read, Diagnostic):
            problems.append(read)
        else:
            layer.written.append(read)
    return layer, problems


def _override(text: str, number: int) -> Written | Diagnostic:
    name, equals, raw = text.partition("=")
    key_at = Span("--set", number, 1, max(1, len(name)), text)
    example = "for example --set actor.lr=1e-4"
    if not equals:
        message = f"--set needs key=value, and there is no = in {text!r}"
        return Diagnostic("error", "E012", message, key_at, found=text, allowed="key=value", fix=example)
    try:
        path = parse_key(name.strip())
    except ValueError:
        message = f"--set: {name!r} is not a key"
        return Diagnostic("error", "E012", message, key_at, found=name, allowed="section.key=value", fix=example)
    start = len(name) + 2 + len(raw) - len(raw.lstrip())
    at = Span("--set", number, start, max(1, len(raw.strip())), text)
    try:
        value, bare = typed(raw)
    except ValueError as error:
        message = f"--set {name}: not a TOML value: {error}"
        fix = 'quote the whole argument for the shell: --set \'data.train=["a.jsonl", "b.jsonl"]\''
        return Diagnostic("error", "E012", message, at, name, found=raw, fix=fix)
    return Written(path, value, key_at, at, (), bare)


def typed(raw: str) -> tuple[Any, str | None]:
    """A TOML value, or the text itself where that cannot have been meant as one; and the text if it has no quotes."""
    text = raw.strip()
    if text[:1] in ('"', "'", "[", "{"):
        return parse_value(text), None
    try:
        return parse_value(text), text
    except ValueError:
        return text, text


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Variables named TQPPO__SECTION__KEY, split and nested by pydantic-settings, each value read like a `--set`'s."""
    layer = Layer("environment", "environment")
    variables = {name: value for name, value in environ.items() if name.upper().startswith(ENV_PREFIX)}
    names = {name.lower(): name for name in variables}
    for path, raw in _exploded({name.lower(): value for name, value in variables.items()}):
        name = names[(ENV_PREFIX + "__".join(path)).lower()]
        text = f"{name}={raw}"
        key_at = Span("environment", 1, len(ENV_PREFIX) + 1, max(1, len(name) - len(ENV_PREFIX)), text)
        at = Span("environment", 1, len(name) + 2, max(1, len(raw)), text)
        try:
            value, bare = typed(raw)
        except ValueError:
            value, bare = raw, raw
        layer.written.append(Written(path, value, key_at, at, (), bare))
    return layer


def _exploded(variables: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings, EnvSettingsSource

    from tqppo.config.sections import Config

    class Source(EnvSettingsSource):
        def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
            return value  # TOML, not JSON: read later, like a --set

    source = Source(BaseSettings, case_sensitive=False, env_prefix=ENV_PREFIX.lower(), env_nested_delimiter="__")
    seen = set()
    for name, field in Config.model_fields.items():
        for path, raw in _leaves((name,), source.explode_env_vars(name, field, variables)):
            seen.add((ENV_PREFIX + "__".join(path)).lower())
            yield path, raw
    for variable, raw in variables.items():
        if variable not in seen:
            yield tuple(part for part in variable[len(ENV_PREFIX) :].split("__")), raw


def _leaves(path: tuple[str, ...], values: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _leaves((*path, name), value)
    else:
        yield path, values
