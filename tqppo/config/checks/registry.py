"""How a check across sections is written: `@check` registers it, a `Context` gives it the config and reports problems.

A check names the keys that it reads, and is skipped while the value of one of them is unresolved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tqppo.config.compilation import Origin, Origins
from tqppo.config.diagnostics import Diagnostic, Severity, Span
from tqppo.config.sections import Config
from tqppo.config.values import brief_toml

MAX_TRIES = 100_000  # numbers that `nearest_numbers` tries in each direction


@dataclass(frozen=True, slots=True)
class Context:
    """The config, where its values come from, and the keys whose values are not known."""

    config: Config
    origins: Origins
    unresolved: frozenset[str] = frozenset()  # keys, `section.*` for whole sections, `*` for everything

    def value(self, key: str) -> Any:
        """The value of a dotted key. Names that a user gave, such as a teacher's, may have dots of their own."""
        found, parts = cast(Any, self.config), key.split(".")
        while parts:
            taken = 1
            if isinstance(found, dict):
                taken = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in found), 1)
            part = ".".join(parts[:taken])
            found, parts = found[part] if isinstance(found, dict) else getattr(found, part), parts[taken:]
        return found

    def origin(self, key: str) -> Origin | None:
        """Where the key, or an entry of the free table that it is, was set last. None: the default holds."""
        own = self.origins.get(key)
        if own:
            return own[-1]
        inside = [chain[-1] for name, chain in self.origins.items() if name.startswith(f"{key}.")]
        return max(inside, key=lambda each: each.layer, default=None)

    def layer(self, key: str) -> int:
        """The layer that set the key last; -1: the default holds."""
        origin = self.origin(key)
        return origin.layer if origin else -1

    def is_unresolved(self, key: str) -> bool:
        """Whether the value of a key, or of any key of `section.*`, is not known."""
        section = key.partition(".")[0]
        if {key, f"{section}.*", "*"} & self.unresolved:
            return True
        return key.endswith(".*") and any(each.startswith(key[:-1]) for each in self.unresolved)

    def report(
        self,
        code: str,
        message: str,
        keys: Sequence[str],
        *,
        found: str = "",
        allowed: str = "",
        fix: str = "",
        on_key: bool = False,
    ) -> Diagnostic:
        """A problem of several keys. Codes that begin with W are warnings.

        The place is that of the first key or, if that has its default, of the key set last. Notes show the others.
        """
        severity: Severity = "warning" if code.startswith("W") else "error"
        main = max(keys, key=self.layer) if self.layer(keys[0]) < 0 else keys[0]
        notes = tuple(f"{key} = {brief_toml(self.value(key))} ({self._place(key)})" for key in keys if key != main)
        span = self._span(main, on_key)
        found = found or f"{main} = {brief_toml(self.value(main))}"
        if span is None:
            found += " (default)"
        return Diagnostic(severity, code, message, span, main, found, allowed, fix, notes)

    def _span(self, key: str, on_key: bool) -> Span | None:
        origin = self.origin(key)
        return None if origin is None else origin.key_span if on_key else origin.span

    def _place(self, key: str) -> str:
        origin = self.origin(key)
        return str(origin) if origin else "default"


Check = Callable[[Context], Iterator[Diagnostic]]


@dataclass(frozen=True, slots=True)
class RegisteredCheck:
    """A check, the keys it reads, and whether it looks up a name (a back end, a task) rather than a combination."""

    function: Check
    reads: tuple[str, ...]
    is_lookup: bool


CHECKS: list[RegisteredCheck] = []


def check(*reads: str, names: bool = False) -> Callable[[Check], Check]:
    """Registers a check. `section.*` stands for all keys of a section.

    Checks with `names=True` look up names and run first. A key with an unknown name is unresolved for the others.
    """

    def register(function: Check) -> Check:
        CHECKS.append(RegisteredCheck(function, reads, names))
        return function

    return register


def nearest_numbers(wanted: int, works: Callable[[int], bool], *, at_most: int) -> str:
    """The nearest working value below and above, as `12 or 16`; values far away are not looked for."""
    below = next((n for n in range(wanted, max(0, wanted - MAX_TRIES), -1) if works(n)), None)
    above = next((n for n in range(wanted + 1, min(at_most, wanted + MAX_TRIES) + 1) if works(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)
