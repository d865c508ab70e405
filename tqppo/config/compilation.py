"""The result of compiling a config: the config, its problems, and where every value comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqppo.config.diagnostics import Diagnostic, Span

if TYPE_CHECKING:
    from tqppo.config.sections import Config


@dataclass(frozen=True, slots=True)
class Origin:
    """One value that a key was set to, and where. Layers count from 0; a default is in layer -1."""

    value: object
    kind: str  # default, preset, config, environment or set
    place: str  # file:line:column, or the text of the argument or variable
    layer: int
    key_span: Span | None = None
    span: Span | None = None

    def __str__(self) -> str:
        return self.place if self.kind != "default" else "default"

    def as_dict(self) -> dict[str, object]:
        return {"value": self.value, "kind": self.kind, "place": self.place}


Origins = dict[str, tuple[Origin, ...]]  # for every key that was set: oldest first, the last one holds


@dataclass(frozen=True, slots=True)
class Compilation:
    """`draft` is the config without its invalid values; `config` is the same, or None when there are errors."""

    draft: Config
    diagnostics: list[Diagnostic]
    origins: Origins
    name: str = "config"

    @property
    def ok(self) -> bool:
        return all(each.severity != "error" for each in self.diagnostics)

    @property
    def config(self) -> Config | None:
        return self.draft if self.ok else None

    def chain(self, key: str) -> tuple[Origin, ...]:
        """The origins of a key; for a free table, the origins of its entries."""
        own = self.origins.get(key, ())
        return own or tuple(
            each for name, chain in self.origins.items() if name.startswith(f"{key}.") for each in chain
        )
