"""`template check`: what a chat template does to conversations of several turns."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tqppo.cli.options import AsJson
from tqppo.cli.output import emit_json, say
from tqppo.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Look at chat templates.")


@app.callback()
def root() -> None:
    """Look at chat templates."""


@app.command("check")
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a tokenizer, a hub name, or tiny.")],
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the template, such as enable_thinking=false."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the turns that a chat template rewrites.

    Plays conversations with the template of a model. A turn that is written in another way once others follow makes a
    session fork into one more trajectory. Ends with exit code 1 if there is one.
    """
    from tqppo.doctor.template import check_templates, load_chat, render

    chat = load_chat(model).with_options(dict(map(_argument, arguments or [])))
    findings = check_templates(chat)
    num_breaks = sum(each.kind == "breaks" for each in findings)
    if as_json:
        emit_json([each.as_dict() for each in findings])
    else:
        render(findings, say)
        say(f"{model}: {num_breaks or 'no'} turn{'s' * (num_breaks != 1)} of the conversations break a prefix")
    raise typer.Exit(1 if num_breaks else 0)


def _argument(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--arg {text!r} should be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
