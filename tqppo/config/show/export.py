"""A compiled config as text: TOML that reproduces the run, the origins of its values, flat keys."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tqppo.config.compilation import Compilation
from tqppo.config.read.paths import absolute
from tqppo.config.sections import Config
from tqppo.config.values import toml_value


def resolved_toml(config: Config) -> str:
    """Every value, defaults included: valid TOML that compiles to the same config on its own, from every folder."""
    import tomli_w

    head = "# Every value of a run, defaults included. To run it again: tqppo train --config THIS_FILE\n\n"
    return head + tomli_w.dumps(_with_full_paths((), config.model_dump(mode="python")))


def _with_full_paths(path: tuple[str, ...], table: dict[str, object]) -> dict[str, object]:
    depth = 3 if path[:1] == ("teachers",) else 2
    return {
        name: _with_full_paths((*path, name), value)
        if isinstance(value, dict) and len(path) + 1 < depth
        else absolute((*path, name), value)
        for name, value in table.items()
    }


def origins_json(compilation: Compilation) -> str:
    """The value of each key and the chain of its origins, oldest first (`config.origins.json` of a run)."""
    entries = {}
    for key, value in flat(compilation.draft):
        chain = [each.as_dict() for each in compilation.chain(key)]
        entries[key] = {"value": value, "origin": chain[-1]["place"] if chain else "default", "chain": chain}
    return json.dumps(entries, indent=2, ensure_ascii=False, default=str) + "\n"


def flat(config: Config) -> Iterator[tuple[str, object]]:
    """Leaf keys and values, in the order of the sections. A free table is one value."""
    for name, section in config.model_dump(mode="python").items():
        if not isinstance(section, dict):
            yield name, section
        elif name == "teachers":
            for teacher, values in section.items():
                yield from ((f"teachers.{teacher}.{key}", value) for key, value in values.items())
        else:
            yield from ((f"{name}.{key}", value) for key, value in section.items())


def flat_toml(config: Config) -> dict[str, str]:
    """Leaf keys and their values as TOML."""
    return {key: toml_value(value) for key, value in flat(config)}
