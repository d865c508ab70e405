"""`explain`: what a diagnostic code means."""

from __future__ import annotations

from typing import Annotated

import typer

from tqppo.cli.output import say
from tqppo.errors import UsageError


def explain(
    code: Annotated[str, typer.Argument(metavar="[CODE]", help="A code such as E104.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Print all codes, as a page in Markdown.")] = False,
) -> None:
    """Say what a diagnostic code means."""
    from tqppo.config.read.nearest import nearest
    from tqppo.config.show.codes import MEANINGS, page

    if every:
        say(page(), nl=False)
        return
    name = code.upper()
    if name not in MEANINGS:
        close = nearest(name, list(MEANINGS), limit=1)
        hint = f"did you mean {close[0]}?" if close else "`tqppo explain --all` prints every code"
        hint = f"settings are explained by: tqppo config explain {code}" if "." in code else hint
        raise UsageError(f"there is no diagnostic {code or 'without a code'}; {hint}")
    say(f"{name}: {MEANINGS[name]}")
