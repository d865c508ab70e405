"""Distillation has teachers, and their pool adds up."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import has_teachers
from tqppo.config.sections import Config, TeacherSection


def pool(config: Config) -> dict[str, TeacherSection]:
    """The teachers that need devices of the pool, because they do not attach to running servers."""
    return {name: each for name, each in config.teachers.items() if not each.endpoints}


@check("mode", "teachers.*")
def distillation_has_a_teacher(context: Context) -> Iterator[Diagnostic]:
    if has_teachers(context.config) and not context.config.teachers:
        fix = 'add a table: [teachers.NAME] path = "…"'
        allowed = "at least one [teachers.NAME]"
        yield context.report("E501", "mode distill needs a teacher", ("mode",), allowed=allowed, fix=fix)


@check("mode", "teachers.*", "distillation.*", "cluster.gpus_per_node")
def pool_has_devices(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    if not has_teachers(config) or config.distillation.gpus_per_node:
        return
    needed = sum(each.replicas * each.tensor_parallel for each in pool(config).values())
    split = [name for name, each in pool(config).items() if each.tensor_parallel > 1]
    if split or (pool(config) and config.cluster.gpus_per_node):
        reason = f"teacher {split[0]} is split over GPUs" if split else "the trainer runs on GPUs"
        yield context.report(
            "E502",
            f"the teacher pool has no GPUs, and {reason}",
            ("distillation.gpus_per_node", *(f"teachers.{name}.tensor_parallel" for name in split)),
            allowed=f"at least 1; these teachers need {needed} in all",
            fix=f"set distillation.gpus_per_node = {ceil(needed / config.distillation.nodes)}",
        )


@check("mode", "teachers.*", "distillation.*")
def pool_adds_up(context: Context) -> Iterator[Diagnostic]:
    config, section = context.config, context.config.distillation
    size, teachers = section.nodes * section.gpus_per_node, pool(context.config)
    needed = sum(each.replicas * each.tensor_parallel for each in teachers.values())
    if not has_teachers(config) or not size or needed == size:
        return
    lines = [
        f"{name}: replicas × GPUs each = {each.replicas} × {each.tensor_parallel}"
        f" = {each.replicas * each.tensor_parallel}"
        for name, each in teachers.items()
    ]
    yield context.report(
        "E503",
        f"the teachers use {needed} GPUs, and their pool has {size}",
        ("distillation.gpus_per_node", "distillation.nodes"),
        found="\n".join([*lines, f"pool: nodes × GPUs each = {section.nodes} × {section.gpus_per_node} = {size}"]),
        allowed="exactly as many GPUs as the teachers use",
        fix=_pool_fix(config, needed, size),
    )


def _pool_fix(config: Config, needed: int, size: int) -> str:
    options = []
    if needed and needed % config.distillation.nodes == 0:
        options.append(f"distillation.gpus_per_node = {needed // config.distillation.nodes}")
    for name, each in pool(config).items():
        room = size - needed + each.replicas * each.tensor_parallel
        if room > 0 and room % each.tensor_parallel == 0:
            options.append(f"teachers.{name}.replicas = {room // each.tensor_parallel}")
    return "set " + ", or ".join(options) if options else "change replicas or the pool until the two agree"


@check("mode", "teachers.*", "distillation.*")
def replicas_stay_on_their_nodes(context: Context) -> Iterator[Diagnostic]:
    """Replicas get the pool's GPUs in order, and none may span more nodes than its size needs."""
    config, per_node = context.config, context.config.distillation.gpus_per_node
    if not has_teachers(config) or not per_node:
        return
    start = 0
    for name, each in pool(config).items():
        size = each.tensor_parallel
        for replica in range(min(each.replicas, per_node)):  # then places on a node repeat
            first = start + replica * size
            nodes = (first + size - 1) // per_node - first // per_node + 1
            if nodes > ceil(size / per_node):
                yield _straddles(context, name, replica, first)
                return
        start += each.replicas * size


def _straddles(context: Context, name: str, replica: int, start: int) -> Diagnostic:
    per_node, size = context.config.distillation.gpus_per_node, context.config.teachers[name].tensor_parallel
    last = start + size - 1
    return context.report(
        "E504",
        f"replica {replica} of teacher {name} would span nodes {start // per_node} and {last // per_node}",
        (f"teachers.{name}.tensor_parallel", "distillation.gpus_per_node"),
        found=f"GPUs {start} to {last} of the pool, with {per_node} per node",
        allowed=f"a replica of {size} GPUs on {ceil(size / per_node)} node(s)",
        fix="list the teachers with larger replicas first, or use sizes that divide distillation.gpus_per_node",
    )
