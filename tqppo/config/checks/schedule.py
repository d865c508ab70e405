"""Warm-ups end within the run, checkpoints to keep are saved, validations have data, the run has a usable name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tqppo.builtin import is_procedural
from tqppo.config import facts
from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.untrusted import FOLDER_NAMES, is_folder_name

MOST_LR, MOST_LORA_LR = 1e-4, 1e-3  # of a warm start; ten times what is usual


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


@check("warm_start.*", "model.path", "model.lora_rank")
def the_warm_start_does_not_ruin_the_model(context: Context) -> Iterator[Diagnostic]:
    """A rate that suits the tiny model comes with its presets; a pretrained model forgets what it knows."""
    config, lr = context.config, facts.warm_start_lr(context.config)
    most = MOST_LORA_LR if config.model.lora_rank else MOST_LR
    if facts.is_warmed(config) and lr > most:
        yield context.report(
            "W313",
            f"supervised steps with a learning rate of {lr:g} undo what a pretrained model knows",
            ("warm_start.lr", "model.path"),
            allowed=f"at most {most:g}",
            fix="set warm_start.lr = 0: 1e-4 for LoRA, 1e-5 otherwise",
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


@check("validation.*", "data.train")
def validations_have_data(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    made = any(is_procedural(each) for each in facts.data_sources(config))
    if config.validation.interval and not config.validation.data and not made:
        yield context.report(
            "W434",
            f"nothing is validated every {config.validation.interval} steps: files have no held-out part of their own",
            ("validation.interval", "validation.data"),
            fix='set validation.data = "held_out.jsonl", or delete validation.interval',
        )


@check("run.name")
def the_name_is_a_folder(context: Context) -> Iterator[Diagnostic]:
    name = context.config.run.name
    if name and not is_folder_name(name):
        plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "mine"
        yield context.report(
            "E435",
            f'"{name}" cannot be the name of a run: it names a folder below run.dir',
            ("run.name",),
            allowed=FOLDER_NAMES,
            fix=f'set run.name = "{plain}"; another place for runs is run.dir',
        )
