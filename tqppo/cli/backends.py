"""`backends list|check|install`: installed back ends, their contract tests, and the engines' environments."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from tqppo.cli.options import AsJson, Quiet, Verbose, verbosity
from tqppo.cli.output import emit_json, say, table
from tqppo.errors import BackendError, PreflightError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

app = typer.Typer(no_args_is_help=True, help="Rollout engines and storages.")

# Optional back ends of tqppo: the package that each imports, and the extra that installs it.
EXTRAS = {("storage", "transferqueue"): ("transfer_queue", "transferqueue")}


@dataclass(frozen=True, slots=True)
class Status:
    """One line of `backends list`."""

    kind: str
    name: str
    ready: bool
    provider: str
    advice: str


@app.command("list")
def list_all(as_json: AsJson = False) -> None:
    """List back ends, whether each is ready, and how to install it."""
    from tqppo import plugins

    found = [_status(kind, name, point) for kind in plugins.KINDS for name, point in plugins.available(kind).items()]
    if as_json:
        emit_json([asdict(each) for each in found])
        return
    rows = [[s.kind, s.name, "ready" if s.ready else "missing", s.provider, s.advice] for s in found]
    table(["kind", "back end", "state", "from", "how to get it"], rows)


def _status(kind: str, name: str, point: EntryPoint) -> Status:
    """Find out without importing the back end, which would load torch."""
    from tqppo.engines import environments as engines

    provider = f"{point.dist.name} {point.dist.version}" if point.dist else "?"
    own = provider.startswith("tqppo ")
    ready, advice = find_spec(point.module) is not None, "" if own else "its module is missing; install it again"
    if kind == "rollout" and own and name in engines.ENVIRONMENTS:
        ready = engines.is_installed(name)
        advice = engines.advice(name)
    elif own and (kind, name) in EXTRAS:
        package, extra = EXTRAS[kind, name]
        ready, advice = find_spec(package) is not None, f"pip install 'tqppo[{extra}]'"
    return Status(kind, name, ready, provider, "" if ready else advice)


@app.command("install")
def install(
    engine: Annotated[list[str], typer.Argument(metavar="vllm|sglang", help="Engines that need an environment.")],
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Build the engines' own CPU environments.

    They lie outside the checkout, and have tested pins.
    """
    from tqppo.engines import environments as engines

    for name in engine:
        if name not in engines.ENVIRONMENTS:
            raise UsageError(
                f"{name!r} needs no environment of its own; those that do: {', '.join(engines.ENVIRONMENTS)}"
            )
    for name in engine:
        engines.install(name, report=(lambda line: None) if quiet else say)


@app.command("check")
def check(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="rollout|storage")],
    backend: Annotated[str, typer.Argument(metavar="NAME", help="As `tqppo backends list` shows it.")],
    verbose: Verbose = 0,
    quiet: Quiet = 0,
) -> None:
    """Run the contract tests on a back end, yours included."""
    from tqppo import plugins

    if kind not in plugins.KINDS:
        raise UsageError(f"there is no kind of back end called {kind!r}; kinds: {', '.join(plugins.KINDS)}")
    plugins.load(kind, backend)  # an unknown name says what there is
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        raise PreflightError("the contract tests need pytest and hypothesis: pip install 'tqppo[testkit]'")
    raise typer.Exit(_run_contract(kind, backend, verbosity(ctx, verbose, quiet)))


def _run_contract(kind: str, name: str, level: int) -> int:
    import subprocess

    module = f"tqppo.contracts.{kind}"
    detail = {-1: "-qq", 0: "-q", 1: "-v", 2: "-vv"}[level]
    command = [sys.executable, "-m", "pytest", "--pyargs", module, "-p", "tqppo.contracts.plugin", "--backend", name]
    # The settings of the project in the current folder must not apply.
    command += [detail, "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "--import-mode=importlib"]
    code = subprocess.run(command, check=False).returncode
    if code > 1:
        raise BackendError(f"the contract tests of {kind} {name} could not run (pytest ended with {code})")
    return code
