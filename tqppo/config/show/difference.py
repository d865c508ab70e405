"""The settings in which two presets differ."""

from __future__ import annotations

from collections.abc import Mapping

from tqppo.config.compile import compile_config
from tqppo.config.show.export import flat_toml


def diff_presets(a: str, b: str, environ: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """Keys whose resolved values differ: (key, value in a, value in b), as TOML; empty where a key is absent."""
    left, right = (flat_toml(compile_config(name, environ=environ or {}).draft) for name in (a, b))
    keys = [*left, *(key for key in right if key not in left)]
    pairs = [(key, left.get(key, ""), right.get(key, "")) for key in keys]
    return [each for each in pairs if each[1] != each[2]]
