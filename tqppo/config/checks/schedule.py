"""Warm-ups end within the run, and the checkpoints to keep are saved."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config import facts
from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic


@check("run.max_steps", "actor.warmup_steps", "critic.warmup_steps", "critic.warmup_only_steps", "mode")
def warm_ups_end(context: Context) -> Iterator[Diagnostic]:
    steps = context.config.run.max_steps
    for key in ("actor.warmup_steps", "critic.warmup_steps", "critic.warmup_only_steps"):
        if context.value(key) >= steps and (facts.has_critic(context.config) or key.startswith("actor")):
            yield context.report(
                "W312",
                f"the warm-up of {context.value(key)} steps does not end within a run of {steps}",
                (key, "run.max_steps"),
                allowed=f"less than {steps}",
                fix=f"set {key} = {steps // 10}",
            )


@check("checkpoint.*")
def kept_checkpoints_are_made(context: Context) -> Iterator[Diagnostic]:
    section = context.config.checkpoint
    if section.keep_every and (not section.interval or section.keep_every % section.interval):
        works = nearest_numbers(section.keep_every, lambda n: n % max(section.interval, 1) == 0, at_most=10**6)
        yield context.report(
            "E414",
            f"no checkpoint is saved at multiples of {section.keep_every}: the interval is {section.interval} steps",
            ("checkpoint.keep_every", "checkpoint.interval"),
            allowed="a multiple of checkpoint.interval",
            fix=f"set checkpoint.keep_every = {works}" if section.interval else "set checkpoint.interval",
        )
