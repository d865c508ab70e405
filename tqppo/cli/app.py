"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from tqppo import space
from tqppo.cli import (
    agent,
    backends,
    chat,
    completion,
    config,
    crash,
    datasets,
    doctor,
    environment,
    evaluate,
    explain,
    export,
    mistakes,
    presets,
    resume,
    reward,
    runs,
    schema,
    template,
    train,
    validate,
)
from tqppo.cli.options import Quiet, Verbose
from tqppo.cli.output import say
from tqppo.errors import TqppoError

EXIT_CODES = (
    "Exit codes: 0 ok, 1 runtime failure, 2 usage, 3 invalid config, 4 preflight failed, 5 checkpoint incompatible "
    "or corrupt, 6 training aborted by policy, 130 and 143 after a signal with a checkpoint saved."
)


class Commands(TyperGroup):
    """The root of the command tree."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get(completion.VARIABLE):
            completion.respond(self)
            return None
        sys.excepthook = crash.report
        try:
            return super().main(*args, **kwargs)
        except TqppoError as error:
            message = str(getattr(error, "cause", error))  # Ray's wrapper of a worker's error holds a traceback too
            say(message if message.startswith("error[") else f"error: {message}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            if (known := space.exhausted(error)) is None:
                raise
            say(f"error: {known}", err=True)
            sys.exit(known.exit_code)

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        self._arguments = list(args)
        with self._in_our_words():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._in_our_words():
            return super().invoke(ctx)

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        """Errors of the option parser become UsageErrors; a group without a command prints its help, as before."""
        try:
            yield
        except TyperException as error:
            if type(error).__name__ == "NoArgsIsHelpError" or not hasattr(error, "format_message"):
                raise
            raise mistakes.explained(error, self._arguments) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[-1] in ("--show-completion", "--install-completion"):
            args = [*args, "auto"]
        return super().parse_args(ctx, args)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"tqppo {version('tqppo')}")
        raise typer.Exit


def _show_completion(shell: str) -> None:
    if shell:
        say(completion.script(shell))
        raise typer.Exit


def _install_completion(shell: str) -> None:
    if shell:
        path, how = completion.install(shell)
        say(f"wrote {path}; {how}")
        raise typer.Exit


app = typer.Typer(
    name="tqppo",
    cls=Commands,
    add_completion=False,  # Typer's own scripts cannot complete past the `=` of `--set key=value`
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes around the help would double the time it takes
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    show_completion: Annotated[
        str,
        typer.Option(
            callback=_show_completion, is_eager=True, metavar="[SHELL]", help="Print the script for bash, zsh or fish."
        ),
    ] = "",
    install_completion: Annotated[
        str,
        typer.Option(
            callback=_install_completion, is_eager=True, metavar="[SHELL]", help="Set completion up for your shell."
        ),
    ] = "",
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Post-train language models with reinforcement learning, from a laptop to a cluster.

    Start with `tqppo train --preset quickstart`.
    """


app.command("train")(train.train)
app.command("resume")(resume.resume)
app.command("eval")(evaluate.evaluate)
app.command("chat")(chat.chat)
app.command("sample")(chat.sample)
app.command("export")(export.export)
app.command("validate-config")(validate.validate)
app.command("explain")(explain.explain)
app.command("schema")(schema.schema)
app.command("env")(environment.show)
app.add_typer(runs.app, name="runs")
app.add_typer(presets.app, name="presets")
app.add_typer(config.app, name="config")
app.add_typer(datasets.app, name="data")
app.add_typer(reward.app, name="reward")
app.add_typer(backends.app, name="backends")
app.add_typer(doctor.app, name="doctor")
app.add_typer(template.app, name="template")
app.add_typer(agent.app, name="agent")
