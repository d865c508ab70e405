"""`runs list`, `runs show`, `runs rm`: the runs under run.dir."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.options import AsJson
from tqppo.cli.output import emit_json, say, table
from tqppo.units import size
from tqppo.untrusted import printable

if TYPE_CHECKING:
    from tqppo.run.folder import RunFolder
    from tqppo.run.summary import RunSummary

app = typer.Typer(no_args_is_help=True, help="List, show and delete runs.")
RunsFolder = Annotated[
    Path | None, typer.Option("--dir", metavar="FOLDER", help="Where the runs are. Default: $TQPPO__RUN__DIR or runs.")
]


@app.callback()
def root() -> None:
    """List, show and delete runs."""


@app.command("list")
def list_runs(folder: RunsFolder = None, as_json: AsJson = False) -> None:
    """List runs: state, steps, scores, age, size; the newest is last."""
    from tqppo.run.summary import age, runs_in, summarise

    found = [summarise(run) for run in runs_in(_folder(folder))]
    if as_json:
        emit_json([each.as_dict() for each in found])
        return
    if not found:
        say(f"there are no runs in {_folder(folder)}/; start one: tqppo train --preset quickstart")
        return
    header = ("run", "state", "steps", "last", "best", "age", "size")
    table(header, [[*_cells(each), age(each.started), size(each.size_bytes)] for each in found])


@app.command("show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's name or folder, or latest.")] = "latest",
    folder: RunsFolder = None,
    as_json: AsJson = False,
    panel: Annotated[bool, typer.Option("--panel", help="Draw the panel that training showed.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the panel as a picture.")] = None,
) -> None:
    """Show one run: its scores, files, and what to type next."""
    from tqppo.run.summary import named_run, summarise

    chosen = named_run(run, _folder(folder))
    if as_json:
        emit_json(summarise(chosen).as_dict())
    elif panel or svg:
        _draw(chosen, svg)
    else:
        _describe(summarise(chosen))


def _draw(run: RunFolder, svg: Path | None) -> None:
    """The panel on the screen, or in a file."""
    from tqppo.display.console import SafeConsole
    from tqppo.display.panel import panel
    from tqppo.run.picture import panel_svg, progress_of

    progress = progress_of(run)
    if svg is None:
        console = SafeConsole(highlight=False)
        console.print(panel(progress, width=console.width))
        return
    svg.write_text(panel_svg(progress), encoding="utf-8")
    say(f"wrote {svg}")


def _describe(found: RunSummary) -> None:
    from tqppo.run.summary import age

    best = "" if found.best_step is None else f" (best {_score(found.best_score)} at step {found.best_step})"
    lines = {
        "run": f"{found.name}, {found.state}, started {age(found.started)} ago, {size(found.size_bytes)}",
        "steps": f"{found.steps} of {found.max_steps}",
        "score": f"{found.score_name or 'none yet'} {_score(found.last_score)}{best}",
        "folder": found.folder,
        "checkpoints": ", ".join(found.checkpoints) or "none",
        "model": found.model or "not exported",
    }
    for label, text in lines.items():
        say(f"{label:<12} {text}")
    for command in _next(found):
        say(f"{'next':<12} {command}")


@app.command("rm")
def remove_runs(
    run: Annotated[list[str], typer.Argument(metavar="RUN", help="Names or folders of runs.")],
    folder: RunsFolder = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs with all their files. One that a process works on is refused."""
    from tqppo.run.summary import remove, run_to_remove, summarise

    chosen = [run_to_remove(each, _folder(folder)) for each in run]
    for each in chosen:
        found = summarise(each)
        question = f"delete {found.folder}: {found.state}, {found.steps} steps, {size(found.size_bytes)}?"
        if yes or typer.confirm(printable(question)):
            say(f"deleted {found.folder}, {size(remove(each))}")


def _folder(given: Path | None) -> Path:
    from tqppo.run.folder import runs_folder

    return given or runs_folder()


def _cells(run: RunSummary) -> list[str]:
    return [run.name, run.state, f"{run.steps}/{run.max_steps}", _score(run.last_score), _score(run.best_score)]


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _next(run: RunSummary) -> list[str]:
    if run.state == "stopped":
        return [f"tqppo resume {run.name}"]
    if run.state == "finished":
        return [
            f"tqppo eval {run.name}",
            f"tqppo chat {run.name}",
            f"tqppo resume {run.name} --max-steps {run.steps * 2}",
        ]
    return []
