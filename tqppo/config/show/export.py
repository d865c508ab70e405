"""A compiled config written out: as TOML that reproduces the run, as origins, as flat keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tqppo.config.read.judge import shown

if TYPE_CHECKING:
    from tqppo.config.compile import Compilation
    from tqppo.config.sections import Config


def resolved_toml(config: Config | Compilation) -> str:
    """Every value, defaults included: valid TOML that compiles to the same config on its own."""
    import tomli_w

    values = _config(config).model_dump(mode="python")
    head = "# Every value of a run, defaults included. To run it again: tqppo train --config THIS_FILE\n\n"
    return head + tomli_w.dumps(values)


def origins_json(compilation: Compilation) -> str:
    """For each key: its value and the chain of who set it, oldest first (`config.origins.json` of a run)."""
    entries = {}
    for key, value in flat(compilation.draft):
        chain = [{"value": each.value, "kind": each.kind, "place": each.place} for each in chain_of(compilation, key)]
        entries[key] = {"value": value, "origin": chain[-1]["place"] if chain else "default", "chain": chain}
    return json.dumps(entries, indent=2, ensure_ascii=False, default=str) + "\n"


def chain_of(compilation: Compilation, key: str) -> list[Any]:
    """Who set a key, or the entries of the table that it is."""
    own = list(compilation.origins.get(key, ()))
    return own or [each for name, chain in compilation.origins.items() if name.startswith(f"{key}.") for each in chain]


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Leaf keys and values, in the order of the sections; free tables are one value."""
    for name, section in config.model_dump(mode="python").items():
        if not isinstance(section, dict):
            yield name, section
        elif name == "teachers":
            yield from (
                (f"teachers.{who}.{key}", value) for who, each in section.items() for key, value in each.items()
            )
        else:
            yield from ((f"{name}.{key}", value) for key, value in section.items())


def flat_toml(config: Config | Compilation) -> dict[str, str]:
    return {key: toml_value(value) for key, value in flat(_config(config))}


def toml_value(value: Any) -> str:
    """One value as TOML, whole."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {toml_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else shown(value)


def _config(config: Any) -> Config:
    return config.draft if hasattr(config, "draft") else config
