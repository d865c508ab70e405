"""Every row of the data has exactly one teacher: the data is looked through before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqppo import tables
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import data_sources, has_teachers, routes_rows
from tqppo.config.read.nearest import nearest
from tqppo.config.read.rows import MAX_SCANNED_BYTES, Values, column_values, source_values
from tqppo.config.sections import Config

SHOWN = 8


@check("mode", "teachers.*", "distillation.route_by")
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
def every_row_has_a_teacher(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    if not has_teachers(config) or not routes_rows(config) or not all(each.match for each in config.teachers.values()):
        return
    found = routing_values(config, data_sources(config))
    yield from _rows_without_a_value(context, found)
    yield from _values_without_a_teacher(context, found)
    if found.is_whole and found.values:
        yield from _teachers_without_rows(context, found)
    elif not found.is_whole:
        yield context.report(
            "W514",
            "the data is too large to look through, so some rows may have no teacher",
            ("data.train", "distillation.route_by"),
            found=f"files of more than {MAX_SCANNED_BYTES >> 20} MiB",
            fix="look at the column of the other rows yourself; parquet files are read faster",
        )


def _values_without_a_teacher(context: Context, found: Values) -> Iterator[Diagnostic]:
    config = context.config
    routed = sorted({value for teacher in config.teachers.values() for value in teacher.match})
    missing = sorted(set(found.values) - set(routed))
    if missing:
        names = _quoted(missing)
        yield context.report(
            "E510",
            f"the data has {config.distillation.route_by} values that no teacher scores: {names}",
            (f"teachers.{next(iter(config.teachers))}.match", "data.train"),
            found=f'"{missing[0]}" in {found.values[missing[0]]}',
            allowed=_quoted(routed),
            fix=f"add {names} to the match of a teacher, or remove these rows",
        )


def _rows_without_a_value(context: Context, found: Values) -> Iterator[Diagnostic]:
    column = context.config.distillation.route_by
    if found.num_missing:
        rows = "1 row has" if found.num_missing == 1 else f"{found.num_missing} rows have"
        yield context.report(
            "E512",
            f"{rows} no {column}, so no teacher can be chosen",
            ("distillation.route_by", "data.train"),
            found=f"nothing in {', '.join(found.missing)}" + (" …" if found.num_missing > len(found.missing) else ""),
            allowed="a column that every row has, in the row itself or in its extra_info",
            fix=f"add {column} to these rows, or set distillation.route_by to another column",
        )


def _teachers_without_rows(context: Context, found: Values) -> Iterator[Diagnostic]:
    for name, teacher in context.config.teachers.items():
        unused = [value for value in teacher.match if value not in found.values]
        if len(unused) < len(teacher.match):
            continue
        close = nearest(unused[0], found.values, limit=1)
        yield context.report(
            "W513",
            f"teacher {name} has nothing to score: no row has {context.config.distillation.route_by} {_quoted(unused)}",
            (f"teachers.{name}.match", "data.train"),
            allowed=_quoted(sorted(found.values)),
            fix=f'did you mean "{close[0]}"?' if close else f"correct the value, or delete [teachers.{name}]",
        )


def routing_values(config: Config, sources: Iterable[str]) -> Values:
    """The values of the routing column of tasks, and of files that can be read."""
    found = Values()
    for source in sources:
        own = _values_of(config, source)
        if own is not None:
            found.merge(own)
    return found


def _values_of(config: Config, source: str) -> Values | None:
    kind, colon, name = source.partition(":")
    by_source = config.distillation.route_by == config.data.source_key
    if colon and kind in ("task", "gym"):
        made = Values()
        made.add(name if by_source else None, source)
        return made
    scanned = [each for path in tables.expand(source) if (each := _values_in(config, path, by_source))]
    for each in scanned[1:]:
        scanned[0].merge(each)
    return scanned[0] if scanned else None


def _values_in(config: Config, path: Path, by_source: bool) -> Values | None:
    if not by_source:
        return column_values(path, config.distillation.route_by)
    is_default = config.data.source_key == "data_source"  # rows without that column have the file's name
    return source_values(path, config.data.source_key, path.stem if is_default else "")


def _quoted(values: Iterable[str]) -> str:
    listed = list(values)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(f'"{each}"' for each in listed[:SHOWN]) + more
