"""Runs every check across sections."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks import (  # noqa: F401 - importing a module registers its checks
    agents,
    algorithm,
    batch,
    context_parallel,
    data,
    devices,
    effect,
    engines,
    in_process,
    lengths,
    memory,
    models,
    privileged,
    routing,
    schedule,
    scoring,
    teachers,
    vocabulary,
)
from tqppo.config.checks.registry import CHECKS, Context
from tqppo.config.compilation import Origins
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.sections import Config


def run_checks(config: Config, origins: Origins, unresolved: frozenset[str]) -> list[Diagnostic]:
    """The problems that all checks find, except checks that read an unresolved key."""
    found = list(_run(Context(config, origins, unresolved), lookups=True))
    unresolved |= {each.key for each in found}
    return [*found, *_run(Context(config, origins, unresolved), lookups=False)]


def _run(context: Context, *, lookups: bool) -> Iterator[Diagnostic]:
    for each in CHECKS:
        if each.is_lookup == lookups and not any(context.is_unresolved(key) for key in each.reads):
            yield from each.function(context)
