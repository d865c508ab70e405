"""`doctor logprobs`: compares the engine's log-probabilities with the trainer's."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tqppo.cli.compiling import compile_named, print_diagnostics
from tqppo.cli.options import AsJson, ConfigFiles, Overrides, Preset
from tqppo.cli.output import emit_json, say
from tqppo.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Diagnose training problems.")


@app.callback()
def root() -> None:
    """Diagnose training problems."""


@app.command("logprobs")
def logprobs(
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", min=1, help="How many prompts to sample.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Compare engine and trainer on the same tokens.

    Samples with the engine, scores with the trainer, and recommends a correction.
    """
    compilation = compile_named(preset, config, overrides)
    print_diagnostics(compilation.diagnostics)
    if not compilation.ok or compilation.config is None:
        raise typer.Exit(ConfigError.exit_code)
    from tqppo.doctor.compare import render
    from tqppo.doctor.logprobs import measure

    result = measure(compilation.config, num_prompts=prompts, announce=lambda what: say(f"{what} …", err=True))
    if as_json:
        emit_json(result.as_dict())
        return
    if not sys.stdout.isatty():
        figures = {key: value for key, value in result.as_dict().items() if key != "worst"}
        say("\n".join(f"{key}: {value}" for key, value in figures.items()))
        return
    from tqppo.display.console import SafeConsole

    title = f"{compilation.name}: {compilation.config.rollout.backend} against transformers in fp32"
    SafeConsole().print(render(result, title=title))
