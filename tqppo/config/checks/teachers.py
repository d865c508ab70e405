"""Distillation has teachers, each sample has exactly one, their pool adds up, and their engines can score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from tqppo.config.checks.engines import unknown_backend
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import context_tokens, data_sources, has_teachers, model_shape
from tqppo.config.plan.shapes import shape_of
from tqppo.config.sections import Config, TeacherSection
from tqppo.engines.capabilities import BUILT_IN, capabilities_of, instead_of

MAX_SCANNED_BYTES = 64 * 1024 * 1024


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
        for replica in range(each.replicas):
            nodes = (start + size - 1) // per_node - start // per_node + 1
            if nodes > ceil(size / per_node):
                yield _straddles(context, name, replica, start)
                return
            start += size


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


@check("mode", "teachers.*", names=True)
def teacher_engines_exist(context: Context) -> Iterator[Diagnostic]:
    for name in context.config.teachers if has_teachers(context.config) else ():
        yield from unknown_backend(context, f"teachers.{name}.backend", "rollout")


@check("mode", "teachers.*", "distillation.*")
def teachers_can_score(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for name, teacher in config.teachers.items() if has_teachers(config) else ():
        key = f"teachers.{name}.backend"
        able = capabilities_of(teacher.backend)
        if able is None:
            continue
        if not able.score_top_k:
            scorers = [each for each, can in BUILT_IN.items() if can.score_top_k]
            message = f"the engine {teacher.backend} cannot score: it only generates"
            yield context.report("E505", message, (key,), allowed=", ".join(scorers), fix=f'set {key} = "{scorers[0]}"')
        yield from _teacher_features(context, name)
        yield from _top_k(context, name, able.score_top_k)


def _teacher_features(context: Context, name: str) -> Iterator[Diagnostic]:
    teacher = context.config.teachers[name]
    able = capabilities_of(teacher.backend)
    assert able is not None, "callers look capabilities up first"
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
    for argument in teacher.engine_args:
        if instead_of(teacher.backend, argument):
            key = f"teachers.{name}.engine_args.{argument}"
            message = f"teachers.{name}.engine_args: tqppo sets {argument} of {teacher.backend} itself"
            fix = f"delete it: the settings of a teacher are those of [teachers.{name}]"
            yield context.report("E417", message, (key,), found=argument, fix=fix, on_key=True)


def _top_k(context: Context, name: str, most: int) -> Iterator[Diagnostic]:
    section = context.config.distillation
    if section.loss.endswith("_topk") and section.top_k > most > 0:
        yield context.report(
            "E506",
            f"distillation.top_k = {section.top_k}, and the engine of teacher {name} returns at most {most}",
            ("distillation.top_k", f"teachers.{name}.backend"),
            allowed=f"at most {most}",
            fix=f"set distillation.top_k = {most}; a few dozen are enough",
        )


@check("mode", "teachers.*", "data.max_prompt_tokens", "rollout.max_new_tokens", "rollout.max_context_tokens")
def teachers_read_whole_rows(context: Context) -> Iterator[Diagnostic]:
    config, needed = context.config, context_tokens(context.config) + 1
    for name, teacher in config.teachers.items() if has_teachers(config) else ():
        key = f"teachers.{name}.max_context_tokens"
        if 0 < teacher.max_context_tokens < needed:
            yield context.report(
                "E507",
                f"teacher {name} takes {teacher.max_context_tokens} tokens; a row and the token after it have {needed}",
                (key, "data.max_prompt_tokens", "rollout.max_new_tokens"),
                allowed=f"at least {needed}, or 0 for exactly that",
                fix=f"set {key} = {needed}",
            )
        shape = shape_of(teacher.path)
        if shape is not None and 0 < shape.context < needed:
            yield context.report(
                "E507",
                f"teacher {name} ({teacher.path}) takes {shape.context} tokens, and rows may have {needed}",
                (f"teachers.{name}.path", "data.max_prompt_tokens", "rollout.max_new_tokens"),
                allowed=f"rows of at most {shape.context - 1} tokens",
                fix="set a smaller rollout.max_new_tokens or data.max_prompt_tokens",
            )


@check("mode", "teachers.*")
def routes_are_unambiguous(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    if not has_teachers(config) or len(config.teachers) < 2:
        return
    for name, teacher in config.teachers.items():
        if not teacher.match:
            yield context.report(
                "E508",
                f"there are {len(config.teachers)} teachers, and {name} does not say which samples it scores",
                (f"teachers.{name}.match", f"teachers.{name}.path"),
                allowed=f"values of the dataset's column {config.distillation.route_by}",
                fix=f'set teachers.{name}.match = ["…"]',
            )
    counts = Counter(value for teacher in config.teachers.values() for value in set(teacher.match))
    for value in (value for value, n in counts.items() if n > 1):
        keys = [f"teachers.{name}.match" for name, teacher in config.teachers.items() if value in teacher.match]
        message = f'"{value}" is routed to {len(keys)} teachers'
        fix = "keep it in the match of one of them"
        yield context.report("E509", message, keys[::-1], allowed="one teacher per value", fix=fix)


@check("mode", "teachers.*", "distillation.route_by", "data.*")
def every_source_has_a_teacher(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    routed = {value for teacher in config.teachers.values() for value in teacher.match}
    if not has_teachers(config) or not routed or not all(teacher.match for teacher in config.teachers.values()):
        return
    missing = sorted(routing_values(config) - routed)
    if missing:
        names = ", ".join(f'"{each}"' for each in missing[:8])
        yield context.report(
            "E510",
            f"the data has {config.distillation.route_by} values that no teacher scores: {names}",
            (f"teachers.{next(iter(config.teachers))}.match", "data.train"),
            found=names,
            allowed=", ".join(f'"{each}"' for each in sorted(routed)),
            fix=f"add {names} to the match of a teacher",
        )


def routing_values(config: Config) -> set[str]:
    """Values of the routing column, from tasks and from files up to MAX_SCANNED_BYTES."""
    values: set[str] = set()
    for source in data_sources(config):
        path = Path(source).expanduser()
        if source.startswith("task:") and config.distillation.route_by == config.data.source_key:
            values.add(source.partition(":")[2])
        elif path.is_file() and path.stat().st_size <= MAX_SCANNED_BYTES:
            values |= _file_values(path, config.distillation.route_by)
    return values


def _file_values(path: Path, column: str) -> set[str]:
    import json

    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        if column not in parquet.read_schema(path).names:
            return set()
        return {str(each) for each in parquet.read_table(path, columns=[column]).column(0).unique().to_pylist()}
    found = set()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # loading the dataset reports broken lines with their numbers
            if isinstance(row, dict) and column in row:
                found.add(str(row[column]))
    return found


@check("mode", "teachers.*", "model.*", "distillation.check_vocabulary")
def vocabularies_agree(context: Context) -> Iterator[Diagnostic]:
    """Compares the sizes of vocabularies, without loading a tokenizer. `--probe` compares the tokenizers themselves."""
    config, own = context.config, model_shape(context.config)
    if not has_teachers(config) or own is None or not config.distillation.check_vocabulary:
        return
    for name, teacher in config.teachers.items():
        other = shape_of(teacher.path)
        if other is not None and abs(other.vocabulary - own.vocabulary) > 1024:
            yield context.report(
                "E511",
                f"teacher {name} has {other.vocabulary} tokens and the student {own.vocabulary}: two tokenizers",
                (f"teachers.{name}.path", "model.path"),
                allowed="a teacher with the student's vocabulary",
                fix="choose a teacher of the student's family, or set distillation.check_vocabulary = false",
            )
