"""Explains a setting: what it means, what it accepts, which layers set it. Also the JSON Schema for editors."""

from __future__ import annotations

from dataclasses import dataclass

from tqppo.config.compilation import Compilation, Origin
from tqppo.config.read.nearest import nearest
from tqppo.config.read.overrides import ENV_PREFIX
from tqppo.config.schema import Setting, setting_of, settings
from tqppo.config.sections import Config
from tqppo.config.show.export import flat
from tqppo.config.values import toml_value
from tqppo.errors import UsageError


@dataclass(frozen=True, slots=True)
class Explanation:
    """One key. `chain` begins with the default and ends with the value that holds."""

    key: str
    doc: str
    allowed: str
    default: object
    value: object
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

    def as_dict(self) -> dict[str, object]:
        chain = [each.as_dict() for each in self.chain]
        own = {"key": self.key, "doc": self.doc, "allowed": self.allowed, "default": self.default}
        return {**own, "value": self.value, "environment": self.environment, "chain": chain}


def explain(compilation: Compilation, key: str) -> Explanation:
    """The explanation of one leaf key. An unknown key is a UsageError that names the nearest ones."""
    values = dict(flat(compilation.draft))
    setting = setting_of(key) if key in values or key in settings() else None
    if setting is None:
        raise UsageError(_unknown(key, list(dict.fromkeys([*settings(), *values]))))
    default = Origin(setting.default, "default", "default", -1)
    chain = (default, *compilation.chain(key))
    value, variable = values.get(key, setting.default), ENV_PREFIX + key.replace(".", "__").upper()
    return Explanation(key, setting.doc, setting.allowed, setting.default, value, chain, variable)


def explain_section(name: str) -> list[Setting]:
    """The settings of a section, for `config explain actor`. Empty for an unknown name."""
    return [setting for key, setting in settings().items() if key.startswith(f"{name}.")]


def _unknown(key: str, known: list[str]) -> str:
    ending = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]
    close = nearest(key, known) or ending
    hint = f" Did you mean {' or '.join(close)}?" if close else " `tqppo schema` lists them all."
    return f"there is no key called {key!r}.{hint}"


def json_schema() -> dict[str, object]:
    """The JSON Schema of a config file. Editors find it by a first line `#:schema tqppo.schema.json`."""
    schema = Config.model_json_schema()
    name = {"type": "string", "description": "A preset's name, or the path of a TOML file"}
    extends = {"anyOf": [name, {"type": "array", "items": name}], "description": "Files to start from; later ones win."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tqppo", **schema}
