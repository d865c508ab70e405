"""Back ends exist and have the features that the config asks for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tqppo import plugins
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read.nearest import did_you_mean
from tqppo.engines.capabilities import BUILT_IN, capabilities_of, instead_of


@cache
def installed(kind: str) -> list[str]:
    """Names of the registered back ends."""
    return plugins.names(kind)


def unknown_backend(context: Context, key: str, kind: str) -> Iterator[Diagnostic]:
    name, known = context.value(key), installed(kind)
    if name not in known:
        yield context.report(
            "E401",
            f'there is no {kind} back end called "{name}"',
            (key,),
            found=f'"{name}"',
            allowed=", ".join(known),
            fix=did_you_mean(name, known) or "`tqppo backends list` shows what is installed",
        )


@check("rollout.backend", names=True)
def engine_exists(context: Context) -> Iterator[Diagnostic]:
    yield from unknown_backend(context, "rollout.backend", "rollout")


@check("storage.backend", names=True)
def storage_exists(context: Context) -> Iterator[Diagnostic]:
    yield from unknown_backend(context, "storage.backend", "storage")


@check("rollout.*")
def engine_has_what_is_asked(context: Context) -> Iterator[Diagnostic]:
    rollout = context.config.rollout
    able = capabilities_of(rollout.backend)
    if able is None:
        return
    asked = {
        "tensor_parallel": (rollout.tensor_parallel > 1 and not able.tensor_parallel, "cannot split a model over GPUs"),
        "endpoints": (bool(rollout.endpoints) and not able.attach, "runs inside tqppo and has no servers"),
        "python": (bool(rollout.python) and not able.needs_environment, "needs no environment of its own"),
        "weight_sync": (rollout.weight_sync == "broadcast" and not able.broadcast, "receives no broadcasts"),
        "engine_args": (bool(rollout.engine_args) and not able.needs_environment, "takes no engine_args"),
    }
    for name, (lacking, why) in asked.items():
        if lacking:
            others = [each for each, can in BUILT_IN.items() if can.attach]
            yield context.report(
                "E402",
                f"rollout.{name}: the engine {rollout.backend} {why}",
                (f"rollout.{name}", "rollout.backend"),
                allowed=f"with {' or '.join(others)}",
                fix=f'delete rollout.{name}, or set rollout.backend = "{others[0]}"',
            )


@check("rollout.backend", "rollout.engine_args")
def engine_args_are_the_users_to_set(context: Context) -> Iterator[Diagnostic]:
    backend = context.config.rollout.backend
    for name in context.config.rollout.engine_args:
        if fix := instead_of(backend, name):
            keys = (f"rollout.engine_args.{name}", "rollout.backend")
            message = f"rollout.engine_args: tqppo sets {name} of {backend} itself"
            yield context.report("E417", message, keys, found=name, fix=fix, on_key=True)


@check("rollout.backend", "run.deterministic")
def determinism_is_possible(context: Context) -> Iterator[Diagnostic]:
    able = capabilities_of(context.config.rollout.backend)
    asked = context.config.run.deterministic and context.origin("run.deterministic") is not None
    if asked and able is not None and not able.deterministic:
        yield context.report(
            "W403",
            f"{context.config.rollout.backend} does not promise the same bytes for the same seed",
            ("run.deterministic", "rollout.backend"),
            fix='set run.deterministic = false, or rollout.backend = "embedded"',
        )


@check("rollout.endpoints", "rollout.replicas")
def endpoints_are_addresses(context: Context) -> Iterator[Diagnostic]:
    rollout = context.config.rollout
    for each in rollout.endpoints:
        if not each.startswith(("http://", "https://")):
            fix = f'write "http://{each}"'
            message, allowed = f'"{each}" is not the address of a server', "http://host:port"
            yield context.report("E405", message, ("rollout.endpoints",), allowed=allowed, fix=fix)
    if rollout.endpoints and rollout.replicas not in (1, len(rollout.endpoints)):
        yield context.report(
            "E404",
            f"rollout.endpoints has {len(rollout.endpoints)} servers, and rollout.replicas is {rollout.replicas}",
            ("rollout.replicas", "rollout.endpoints"),
            allowed=f"{len(rollout.endpoints)}: one replica per server",
            fix="delete rollout.replicas",
        )
