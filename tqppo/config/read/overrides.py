"""Reads settings from outside files: `--set key=value`, and TQPPO__SECTION__KEY in the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tqppo.config.diagnostics import Diagnostic, Span
from tqppo.config.read.assignment import KeyAssignment, SettingsLayer
from tqppo.config.read.spans import parse_key, parse_value
from tqppo.config.schema import setting_of, settings

ENV_PREFIX = "TQPPO__"


def override_layer(overrides: Sequence[str]) -> tuple[SettingsLayer, list[Diagnostic]]:
    """The `--set` arguments, and a problem for each that is not `key=value`."""
    layer, problems = SettingsLayer("set", "--set"), []
    for number, text in enumerate(overrides, 1):
        read = _override(text, number)
        if isinstance(read, Diagnostic):
            problems.append(read)
        else:
            layer.assignments.append(read)
    return layer, problems


def _override(text: str, number: int) -> KeyAssignment | Diagnostic:
    name, equals, raw = text.partition("=")
    key_span = Span("--set", number, 1, max(1, len(name)), text)
    example = "for example --set actor.lr=1e-4"
    if not equals:
        message = f"--set needs key=value, and there is no = in {text!r}"
        return Diagnostic("error", "E012", message, key_span, found=text, allowed="key=value", fix=example)
    try:
        path = parse_key(name.strip())
    except ValueError:
        message = f"--set: {name!r} is not a key"
        return Diagnostic("error", "E012", message, key_span, found=name, allowed="section.key=value", fix=example)
    start = len(name) + 2 + len(raw) - len(raw.lstrip())
    value_span = Span("--set", number, start, max(1, len(raw.strip())), text)
    try:
        value, unquoted = _text_or_value(path, raw)
    except ValueError as error:
        message = f"--set {name}: not a TOML value: {error}"
        fix = 'quote the whole argument for the shell: --set \'data.train=["a.jsonl", "b.jsonl"]\''
        return Diagnostic("error", "E012", message, value_span, name, found=raw, fix=fix)
    return KeyAssignment(path, value, key_span, value_span, (), unquoted)


def _text_or_value(path: tuple[str, ...], raw: str) -> tuple[object, str | None]:
    """The value; for a setting that takes only text, `{prompt} and more` is that text."""
    try:
        return read_value(raw)
    except ValueError:
        setting = setting_of(".".join(path))
        if setting is None or not setting.takes_only_text or raw.strip()[:1] != "{":
            raise
        return raw.strip(), raw.strip()


def read_value(raw: str) -> tuple[object, str | None]:
    """The value, and its text if that has no quotes or brackets. Text that is not TOML is a string."""
    text = raw.strip()
    if text[:1] in ('"', "'", "[", "{"):
        return parse_value(text), None
    try:
        return parse_value(text), text
    except ValueError:
        return text, text


def environment_layer(environ: Mapping[str, str]) -> SettingsLayer:
    """Variables named TQPPO__SECTION__KEY. pydantic-settings splits the names; values are read as for `--set`."""
    layer = SettingsLayer("environment", "environment")
    variables = {name: value for name, value in environ.items() if name.upper().startswith(ENV_PREFIX)}
    names = {name.lower(): name for name in variables}
    for path, raw in _split_names({name.lower(): value for name, value in variables.items()}):
        name = names[(ENV_PREFIX + "__".join(path)).lower()]
        text = f"{name}={raw}"
        key_span = Span("environment", 1, len(ENV_PREFIX) + 1, max(1, len(name) - len(ENV_PREFIX)), text)
        value_span = Span("environment", 1, len(name) + 2, max(1, len(raw)), text)
        try:
            value, unquoted = read_value(raw)
        except ValueError:
            value, unquoted = raw, raw
        layer.assignments.append(KeyAssignment(path, value, key_span, value_span, (), unquoted))
    return layer


def misspelt_variables(environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Variables such as TQPPO_ACTOR_LR, which would set nothing: a setting's variable has two underscores."""
    single = {name: name[len("TQPPO_") :].lower() for name in environ if _has_single_underscore(name)}
    if not single:
        return
    keys = {key.replace(".", "_"): key for key in settings()}
    for name in sorted(name for name, rest in single.items() if rest in keys):
        key = keys[single[name]]
        wanted = ENV_PREFIX + key.upper().replace(".", "__")
        text = f"{name}={environ[name]}"
        span = Span("environment", 1, 1, len(name), text)
        message = f"the variable {name} sets nothing: names of settings have two underscores"
        yield Diagnostic("warning", "W013", message, span, key, found=name, allowed=wanted, fix=f"write {wanted}")


def _has_single_underscore(name: str) -> bool:
    return name.upper().startswith("TQPPO_") and not name.upper().startswith(ENV_PREFIX)


def _split_names(variables: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings, EnvSettingsSource

    from tqppo.config.sections import Config

    class Source(EnvSettingsSource):
        def decode_complex_value(self, field_name: str, field: FieldInfo, value: object) -> object:
            return value  # pydantic-settings would read JSON; values here are TOML and are read later

    source = Source(BaseSettings, case_sensitive=False, env_prefix=ENV_PREFIX.lower(), env_nested_delimiter="__")
    seen = set()
    for name, field in Config.model_fields.items():
        for path, raw in _leaves((name,), source.explode_env_vars(name, field, variables)):
            seen.add((ENV_PREFIX + "__".join(path)).lower())
            yield path, raw
    for variable, raw in variables.items():
        if variable not in seen:
            yield tuple(part for part in variable[len(ENV_PREFIX) :].split("__")), raw


def _leaves(path: tuple[str, ...], values: object) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _leaves((*path, name), value)
    else:
        yield path, str(values)
