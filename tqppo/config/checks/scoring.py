"""Teachers can score what the loss needs: their engines exist and have the features, their contexts are long enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tqppo.builtin import TASKS, check_task_arguments
from tqppo.config.checks.engines import unknown_backend
from tqppo.config.checks.models import SERVED_HEADS
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import (
    WHOLE_VOCABULARY,
    has_teachers,
    named_models,
    student_teachers,
    task_teachers,
    teacher_needs_tokens,
    uses_top_k,
)
from tqppo.config.plan.shapes import shape_of
from tqppo.config.read.nearest import did_you_mean
from tqppo.engines.capabilities import BUILT_IN, capabilities_of, instead_of
from tqppo.errors import UsageError
from tqppo.protocols import EngineCapabilities


@check("mode", "teachers.*", names=True)
def teacher_engines_exist(context: Context) -> Iterator[Diagnostic]:
    for name in context.config.teachers if has_teachers(context.config) else ():
        yield from unknown_backend(context, f"teachers.{name}.backend", "rollout")


@check("mode", "teachers.*", names=True)
def teacher_names_are_plain(context: Context) -> Iterator[Diagnostic]:
    """Names of teachers are names of metrics, of log files and of cache files."""
    for name in context.config.teachers if has_teachers(context.config) else ():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            yield context.report(
                "E516",
                f'"{name}" cannot be the name of a teacher: it names metrics and files',
                ("teachers",),
                found=f'"{name}"',
                allowed="letters, digits, - and _, at most 40",
                fix=f"write [teachers.{re.sub(r'[^A-Za-z0-9_-]+', '-', name)[:40].strip('-') or 'main'}]",
            )


@check("mode", "teachers.*", "distillation.*")
def teachers_can_score(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for name, teacher in config.teachers.items() if has_teachers(config) else ():
        able = capabilities_of(teacher.backend)
        if able is None:
            continue
        yield from _scores(context, name, able)
        yield from _features(context, name, able)
        yield from _top_k(context, name, able.score_top_k)
        yield from _engine_args(context, name)


def _scores(context: Context, name: str, able: EngineCapabilities) -> Iterator[Diagnostic]:
    key, backend = f"teachers.{name}.backend", context.config.teachers[name].backend
    loss = context.config.distillation.loss
    if not able.score_top_k:
        scorers = [each for each, can in BUILT_IN.items() if can.score_top_k]
        message = f"the engine {backend} cannot score: it only generates"
        yield context.report("E505", message, (key,), allowed=", ".join(scorers), fix=f'set {key} = "{scorers[0]}"')
    elif loss in WHOLE_VOCABULARY and not able.score_hidden:
        givers = [each for each, can in BUILT_IN.items() if can.score_hidden]
        yield context.report(
            "E517",
            f"{loss} compares whole vocabularies, and the engine {backend} of teacher {name} gives no hidden states",
            ("distillation.loss", key),
            allowed=f"{loss} with {' or '.join(givers)}; with {backend} a top-k loss",
            fix=f'set distillation.loss = "{loss}_topk", or {key} = "{givers[0]}"',
        )


def _features(context: Context, name: str, able: EngineCapabilities) -> Iterator[Diagnostic]:
    teacher = context.config.teachers[name]
    asked = {
        "tensor_parallel": teacher.tensor_parallel > 1 and not able.tensor_parallel,
        "endpoints": bool(teacher.endpoints) and not able.attach,
        "python": bool(teacher.python) and not able.needs_environment,
        "engine_args": bool(teacher.engine_args) and not able.needs_environment,
    }
    for field in (field for field, lacking in asked.items() if lacking):
        key = f"teachers.{name}.{field}"
        yield context.report(
            "E402",
            f"{key}: the engine {teacher.backend} does not have this feature",
            (key, f"teachers.{name}.backend"),
            allowed="with vllm or sglang",
            fix=f'delete {key}, or set teachers.{name}.backend = "vllm"',
        )


def _engine_args(context: Context, name: str) -> Iterator[Diagnostic]:
    teacher = context.config.teachers[name]
    for argument in teacher.engine_args:
        if instead_of(teacher.backend, argument):
            key = f"teachers.{name}.engine_args.{argument}"
            message = f"teachers.{name}.engine_args: tqppo sets {argument} of {teacher.backend} itself"
            fix = f"delete it: the settings of a teacher are those of [teachers.{name}]"
            yield context.report("E417", message, (key,), found=argument, fix=fix, on_key=True)


def _top_k(context: Context, name: str, most: int) -> Iterator[Diagnostic]:
    section = context.config.distillation
    if uses_top_k(context.config) and section.top_k > most > 0:
        yield context.report(
            "E506",
            f"distillation.top_k = {section.top_k}, and the engine of teacher {name} returns at most {most}",
            ("distillation.top_k", f"teachers.{name}.backend"),
            allowed=f"at most {most}",
            fix=f"set distillation.top_k = {most}; a few dozen are enough",
        )


@check("mode", "teachers.*")
def teacher_endpoints_are_addresses(context: Context) -> Iterator[Diagnostic]:
    for name, teacher in context.config.teachers.items() if has_teachers(context.config) else ():
        key, servers = f"teachers.{name}.endpoints", len(teacher.endpoints)
        for each in teacher.endpoints:
            if not each.startswith(("http://", "https://")):
                message, fix = f'"{each}" is not the address of a server', f'write "http://{each}"'
                yield context.report("E405", message, (key,), allowed="http://host:port", fix=fix)
        if servers and teacher.replicas not in (1, servers):
            yield context.report(
                "E404",
                f"{key} has {servers} servers, and teachers.{name}.replicas is {teacher.replicas}",
                (f"teachers.{name}.replicas", key),
                allowed=f"{servers}: one replica per server",
                fix=f"delete teachers.{name}.replicas",
            )


@check("mode", "teachers.*", "data.max_prompt_tokens", "rollout.max_new_tokens", "rollout.max_context_tokens")
def teachers_read_whole_rows(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for name, teacher in config.teachers.items() if has_teachers(config) else ():
        key, needed = f"teachers.{name}.max_context_tokens", teacher_needs_tokens(config, name)
        if 0 < teacher.max_context_tokens < needed:
            yield context.report(
                "E507",
                f"teacher {name} takes {teacher.max_context_tokens} tokens; a row and the token after it have {needed}",
                (key, "data.max_prompt_tokens", "rollout.max_new_tokens"),
                allowed=f"at least {needed}, or 0 for exactly that",
                fix=f"set {key} = {needed}",
            )
        shape = shape_of(named_models(config).get(name, ""))
        if shape is not None and 0 < shape.context < needed:
            yield context.report(
                "E507",
                f"teacher {name} ({teacher.path}) takes {shape.context} tokens, and rows may have {needed}",
                (f"teachers.{name}.path", "data.max_prompt_tokens", "rollout.max_new_tokens"),
                allowed=f"rows of at most {shape.context - 1} tokens",
                fix="set a smaller rollout.max_new_tokens or data.max_prompt_tokens",
            )


@check("mode", "teachers.*", "model.*", "data.task_args")
def task_teachers_can_be_made(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for name, task in task_teachers(config).items() if has_teachers(config) else ():
        key = f"teachers.{name}.path"
        if task not in TASKS:
            known = [f"task:{each}" for each in TASKS]
            fix = did_you_mean(f"task:{task}", known) or "name a task, or the folder of a trained model"
            message = f'there is no task called "{task}"'
            yield context.report("E409", message, (key,), allowed=", ".join(known), fix=fix)
        elif config.model.path != "tiny":
            yield context.report(
                "E518",
                f"teacher {name} would be a tiny model for the tiny student, and the student is {config.model.path}",
                (key, "model.path"),
                allowed='task:NAME for model.path = "tiny" only',
                fix=f"set {key} to a trained model with the student's vocabulary",
            )
        else:
            yield from _task_teacher(context, name, task)


def _task_teacher(context: Context, name: str, task: str) -> Iterator[Diagnostic]:
    config, teacher = context.config, context.config.teachers[name]
    try:
        check_task_arguments(task, config.data.task_args)
    except UsageError as error:
        yield context.report("E410", f"teacher {name}: {error}", ("data.task_args", f"teachers.{name}.path"))
    size = config.model.hidden_size // config.model.num_heads
    if teacher.backend in ("vllm", "sglang") and size not in SERVED_HEADS:
        yield context.report(
            "E413",
            f"{teacher.backend} cannot serve the attention heads of teacher {name}, of size {size} like the student's",
            ("model.num_heads", "model.hidden_size", f"teachers.{name}.backend"),
            allowed=", ".join(map(str, SERVED_HEADS)),
            fix=f'set teachers.{name}.backend = "embedded", or model.hidden_size = 64 and model.num_heads = 2',
        )


@check("mode", "teachers.*")
def self_teachers_know_more(context: Context) -> Iterator[Diagnostic]:
    for name in student_teachers(context.config) if has_teachers(context.config) else ():
        if not context.config.teachers[name].prompt:
            yield context.report(
                "W519",
                f"teacher {name} is the student at its start and reads the same prompt, so it teaches nothing new",
                (f"teachers.{name}.path", f"teachers.{name}.prompt"),
                fix=f'give it more to read: set teachers.{name}.prompt = "{{prompt}}\\nReference: {{answer}}"',
            )


@check("mode", "rollout.temperature")
def student_is_compared_as_it_samples(context: Context) -> Iterator[Diagnostic]:
    if has_teachers(context.config) and context.config.rollout.temperature != 1.0:
        yield context.report(
            "W520",
            f"the student samples at temperature {context.config.rollout.temperature:g}, and both models are compared "
            "at temperature 1",
            ("rollout.temperature", "mode"),
            fix="set rollout.temperature = 1.0",
        )


@check("mode", "distillation.on_teacher_failure", "rollout.on_incomplete_group")
def dropped_groups_do_not_end_the_run(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    drops = config.distillation.on_teacher_failure == "drop"
    if has_teachers(config) and drops and config.rollout.on_incomplete_group == "error":
        yield context.report(
            "E521",
            "groups without a teacher's scores are dropped, and rollout.on_incomplete_group ends the run for each",
            ("distillation.on_teacher_failure", "rollout.on_incomplete_group"),
            allowed='rollout.on_incomplete_group = "drop" or "refill"',
            fix='set rollout.on_incomplete_group = "drop", or delete distillation.on_teacher_failure',
        )
