"""Checks across sections: each names the keys that it reads, and is skipped when one of them is in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqppo.config.diagnostics import Diagnostic, Severity, Span
from tqppo.config.read.judge import shown
from tqppo.config.sections import Config

if TYPE_CHECKING:
    from tqppo.config.compile import Origin

Origins = Mapping[str, tuple["Origin", ...]]


@dataclass(frozen=True, slots=True)
class Context:
    """The whole config, and who set what."""

    config: Config
    origins: Origins
    doubtful: frozenset[str] = frozenset()

    def value(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        return found

    def origin(self, key: str) -> Origin | None:
        """Who set the key last; of a free table, who set one of its entries last. None: the default holds."""
        own = self.origins.get(key)
        if own:
            return own[-1]
        inside = [chain[-1] for name, chain in self.origins.items() if name.startswith(f"{key}.")]
        return max(inside, key=lambda each: each.layer, default=None)

    def layer(self, key: str) -> int:
        origin = self.origin(key)
        return origin.layer if origin else -1

    def in_doubt(self, key: str) -> bool:
        section = key.partition(".")[0]
        return bool({key, f"{section}.*", "*"} & self.doubtful)

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
        """A problem of several keys, shown where the first of them stands, or, if that holds its default, where
        the one that was set last does; the others go into notes. Codes that begin with W are warnings."""
        severity: Severity = "warning" if code.startswith("W") else "error"
        main = max(keys, key=self.layer) if self.layer(keys[0]) < 0 else keys[0]
        notes = tuple(f"{key} = {shown(self.value(key))} ({self._place(key)})" for key in keys if key != main)
        span = self._span(main, on_key)
        found = found or f"{main} = {shown(self.value(main))}"
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
_CHECKS: list[tuple[bool, tuple[str, ...], Check]] = []


def check(*reads: str, names: bool = False) -> Callable[[Check], Check]:
    """Registers a check. `section.*` stands for all keys of a section. Checks of `names` (is there such a back end,
    such a task) come first; a key with a wrong name is in doubt for the others."""

    def register(function: Check) -> Check:
        _CHECKS.append((names, reads, function))
        return function

    return register


def run_checks(config: Config, origins: Origins, doubtful: frozenset[str]) -> list[Diagnostic]:
    from tqppo.config.checks import algorithm as check_algorithm  # noqa: F401
    from tqppo.config.checks import batch as check_batch  # noqa: F401
    from tqppo.config.checks import effect as check_effect  # noqa: F401
    from tqppo.config.checks import engines as check_engines  # noqa: F401
    from tqppo.config.checks import teachers as check_teachers  # noqa: F401

    found = list(_run(Context(config, origins, doubtful), names=True))
    doubtful |= {each.key for each in found}
    return [*found, *_run(Context(config, origins, doubtful), names=False)]


def _run(context: Context, *, names: bool) -> Iterator[Diagnostic]:
    for is_name, reads, function in _CHECKS:
        if is_name == names and not _any_doubt(context, reads):
            yield from function(context)


def _any_doubt(context: Context, reads: tuple[str, ...]) -> bool:
    for key in reads:
        if context.in_doubt(key):
            return True
        if key.endswith(".*") and any(each.startswith(key[:-1]) for each in context.doubtful):
            return True
    return False


def nearest_numbers(wanted: int, works: Callable[[int], bool], *, at_most: int) -> str:
    """The nearest working value below and above, as `12 or 16`."""
    below = next((n for n in range(wanted, 0, -1) if works(n)), None)
    above = next((n for n in range(wanted + 1, at_most + 1) if works(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)
