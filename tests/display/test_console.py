"""Whatever a run shows of data, models and names does not reach the terminal as a command."""

from __future__ import annotations

import io
import re

from rich.table import Table
from rich.text import Text

from tqppo.display.console import SafeConsole
from tqppo.display.display import Display, Ending

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
COLOURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*[AK]|\x1b\[2K|\r")  # what rich itself writes


def obeyed(text: str) -> list[str]:
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f]", COLOURS.sub("", text))


def test_texts_keep_their_colours_and_lose_their_commands() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=120)
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    console.print(table)
    console.print(HOSTILE, Text("plain"))
    assert r"\x1b]0;owned" in out.getvalue()
    assert "\x1b[31m" in out.getvalue()
    assert not obeyed(out.getvalue())


def test_a_run_shows_hostile_names_examples_and_metrics_as_text() -> None:
    out = io.StringIO()
    display = Display(
        f"run {HOSTILE}",
        subtitle=HOSTILE,
        max_steps=2,
        console=SafeConsole(file=out, force_terminal=True, width=120, highlight=False),
    )
    with display:
        with display.stage(f"loading {HOSTILE}"):
            display.note(f"note {HOSTILE}")
        display.progress.example = HOSTILE
        display.step(1, {f"val-core/{HOSTILE}/acc/mean@1": 0.5, f"timing_s/{HOSTILE}": 1.0})
        display.warn(HOSTILE)
        display.finish(Ending("finished", {"run": HOSTILE}, [(HOSTILE, HOSTILE)]))
    assert out.getvalue().count(r"\x1b]0;owned") > 5
    assert not obeyed(out.getvalue())


def test_the_display_of_a_run_has_such_a_console() -> None:
    assert isinstance(Display("mine").console, SafeConsole)
