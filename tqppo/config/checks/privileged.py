"""A teacher's own prompt names columns that the data has, and contains the student's prompt."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter

from tqppo import tables
from tqppo.builtin import is_procedural
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import data_sources, has_teachers
from tqppo.config.read.rows import column_values

OWN_FIELDS = ("prompt", "answer")  # every row has them; other fields are columns


@check("mode", "teachers.*", "data.*")
def teachers_own_prompts_can_be_filled_in(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for name, teacher in config.teachers.items() if has_teachers(config) else ():
        if not teacher.prompt:
            continue
        try:
            fields = list(dict.fromkeys(fields_of(teacher.prompt)))
        except ValueError as error:
            yield context.report(
                "E522",
                f"teachers.{name}.prompt is not a template: {error}",
                (f"teachers.{name}.prompt",),
                allowed="text with {prompt}, {answer} and {column}; a brace itself is {{ or }}",
                fix=f'write teachers.{name}.prompt = "{{prompt}}\\nReference: {{answer}}"',
            )
            continue
        yield from _has_the_question(context, name, fields)
        yield from _has_answers(context, name, fields)
        yield from _has_columns(context, name, [each for each in fields if each not in OWN_FIELDS])


def fields_of(template: str) -> Iterator[str]:
    """The names in braces. Raises ValueError for a template that cannot be filled in by name alone."""
    for _, field, form, conversion in Formatter().parse(template):
        if field is None:
            continue
        if not field or not field.replace(".", "_").replace("-", "_").isidentifier() or form or conversion:
            raise ValueError(f'"{{{field}}}" is not the name of a column')
        yield field


def _has_the_question(context: Context, name: str, fields: list[str]) -> Iterator[Diagnostic]:
    if "prompt" not in fields:
        yield context.report(
            "E523",
            f"the prompt of teacher {name} does not contain the student's, so it would not know the question",
            (f"teachers.{name}.prompt",),
            allowed="a text with {prompt}",
            fix=f'set teachers.{name}.prompt = "{{prompt}}\\nReference: {{answer}}"',
        )


def _has_answers(context: Context, name: str, fields: list[str]) -> Iterator[Diagnostic]:
    if "answer" in fields and not context.config.data.answer_key:
        yield context.report(
            "E524",
            f"the prompt of teacher {name} contains {{answer}}, and rows have none: data.answer_key is empty",
            (f"teachers.{name}.prompt", "data.answer_key"),
            fix="set data.answer_key to the column with the reference answer",
        )


def _has_columns(context: Context, name: str, fields: list[str]) -> Iterator[Diagnostic]:
    """Reports the first place where a row lacks the column; one message per column."""
    for field in fields:
        where = next((place for source in data_sources(context.config) if (place := _lacks(source, field))), "")
        if where:
            yield context.report(
                "E524",
                f"the prompt of teacher {name} contains {{{field}}}, and a row has no such column: {where}",
                (f"teachers.{name}.prompt", "data.train"),
                allowed="{prompt}, {answer}, and columns that every row has, in the row itself or in its extra_info",
                fix=f"add the column {field} to the data, or take it out of the prompt",
            )


def _lacks(source: str, field: str) -> str:
    """The first row of a source without the column; empty if all rows have it, or the file cannot be read."""
    if is_procedural(source):
        return source
    scanned = (column_values(path, field) for path in tables.expand(source))
    return next((found.missing[0] for found in scanned if found and found.missing), "")
