"""What a key means, what it accepts, and who set it; and the JSON Schema that editors use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqppo.config.compile import Compilation, Origin
from tqppo.config.read.nearest import nearest
from tqppo.config.show.export import chain_of, flat, toml_value
from tqppo.errors import UsageError

if TYPE_CHECKING:
    from tqppo.config.show.schema import Slot


@dataclass(frozen=True, slots=True)
class Explanation:
    """One key. `chain` begins with the default and ends with what holds."""

    key: str
    doc: str
    allowed: str
    default: Any
    value: Any
    chain: tuple[Origin, ...]
    environment: str

    def text(self) -> str:
        lines = [f"{self.key} = {toml_value(self.value)}", "", self.doc, "", f"allowed      {self.allowed}"]
        lines += [f"default      {'none: it must be set' if self.default is None else toml_value(self.default)}"]
        lines += [
            f"environment  {self.environment}",
            f"command line --set {self.key}=…",
            "",
            "set by, the last one holds:",
        ]
        width = max(len(toml_value(each.value)) for each in self.chain)
        lines += [f"  {toml_value(each.value):<{width}}  ← {each.place}" for each in self.chain]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        chain = [{"value": each.value, "kind": each.kind, "place": each.place} for each in self.chain]
        own = {"key": self.key, "doc": self.doc, "allowed": self.allowed, "default": self.default}
        return {**own, "value": self.value, "environment": self.environment, "chain": chain}


def explain(compilation: Compilation, key: str) -> Explanation:
    """One leaf key. UsageError for a key that does not exist, with the nearest ones."""
    from tqppo.config.show.schema import slot_of, slots

    values = dict(flat(compilation.draft))
    slot = slot_of(key) if key in values or key in slots() else None
    if slot is None:
        raise UsageError(_unknown(key, [*slots(), *values]))
    default = Origin(slot.default, "default", "default", -1)
    chain = (default, *chain_of(compilation, key))
    environment = "TQPPO__" + key.replace(".", "__").upper()
    return Explanation(key, slot.doc, slot.allowed, slot.default, values.get(key, slot.default), chain, environment)


def explain_section(name: str) -> list[Slot]:
    """The keys of a section, for `config explain actor`. Empty for an unknown name."""
    from tqppo.config.show.schema import slots

    return [slot for key, slot in slots().items() if key.startswith(f"{name}.")]


def _unknown(key: str, known: list[str]) -> str:
    ending = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]
    close = nearest(key, known) or ending
    hint = f" Did you mean {' or '.join(close)}?" if close else " `tqppo schema` lists them all."
    return f"there is no key called {key!r}.{hint}"


def json_schema() -> dict[str, Any]:
    """JSON Schema of a config file, for editors (`#:schema tqppo.schema.json` as a file's first line)."""
    from tqppo.config.sections import Config

    schema = Config.model_json_schema()
    name = {"type": "string", "description": "A preset's name, or the path of a TOML file"}
    extends = {"anyOf": [name, {"type": "array", "items": name}], "description": "Files to start from; later ones win."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tqppo", **schema}
