"""Back ends exist and have the features that the config asks for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tqppo import plugins
from tqppo.builtin import AGENT_ARGUMENTS, AGENTS
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


@check("rollout.agent", names=True)
def agent_exists(context: Context) -> Iterator[Diagnostic]:
    name = context.config.rollout.agent
    if name not in AGENTS and ":" not in name:
        yield context.report(
            "E408",
            f'there is no agent called "{name}"',
            ("rollout.agent",),
            allowed=", ".join(AGENTS) + ', or your own as "module:Class" or "file.py:Class"',
            fix=did_you_mean(name, AGENTS) or f'write "{name}:Class" if {name} is a module of yours',
        )


@check("rollout.agent", "rollout.agent_args")
def agent_takes_its_arguments(context: Context) -> Iterator[Diagnostic]:
    rollout = context.config.rollout
    known = AGENT_ARGUMENTS.get(rollout.agent)
    for name in rollout.agent_args if known is not None else ():
        if name not in (known or ()):
            yield context.report(
                "E418",
                f"the agent {rollout.agent} has no argument {name}",
                (f"rollout.agent_args.{name}", "rollout.agent"),
                found=name,
                allowed=", ".join(known or ()),
                fix=did_you_mean(name, list(known or ())) or f"delete rollout.agent_args.{name}",
                on_key=True,
            )
    if rollout.agent in ("tools", "rewrite"):
        yield from _tools_exist(context)
    if rollout.agent == "environment" and not isinstance(rollout.agent_args.get("environment"), str):
        yield context.report(
            "E419",
            "the agent environment needs one to play in",
            ("rollout.agent_args", "rollout.agent"),
            allowed="module:Class, file.py:Class or skyrl:NAME",
            fix='set rollout.agent_args.environment = "game.py:Game"',
        )


@check("rollout.max_trajectories", "rollout.agent_args")
def rewritings_fit(context: Context) -> Iterator[Diagnostic]:
    """The loop `rewrite` may rewrite before each turn that has more than `keep_turns` before it."""
    rollout = context.config.rollout
    turns, kept = rollout.agent_args.get("max_turns", 4), rollout.agent_args.get("keep_turns", 1)
    if rollout.agent != "rewrite" or not isinstance(turns, int) or not isinstance(kept, int):
        return
    most = max(1, turns - kept)
    if most > rollout.max_trajectories:
        yield context.report(
            "E420",
            f"a session of {turns} turns may be rewritten into {most} trajectories, and "
            f"rollout.max_trajectories is {rollout.max_trajectories}",
            ("rollout.max_trajectories", "rollout.agent_args"),
            allowed=f"{most} or more",
            fix=f"set rollout.max_trajectories = {most}",
        )


def _tools_exist(context: Context) -> Iterator[Diagnostic]:
    """Tools are named, and their files are there. `--probe` imports them."""
    tools = context.config.rollout.agent_args.get("tools")
    example = 'rollout.agent_args.tools = ["tools.py:calculate"]'
    if not isinstance(tools, list) or not tools or not all(isinstance(each, str) for each in tools):
        message = f"the agent {context.config.rollout.agent} needs a list of functions"
        allowed = "module:function or file.py:function"
        keys = ("rollout.agent_args", "rollout.agent")
        yield context.report("E419", message, keys, allowed=allowed, fix=f"set {example}")
        return
    for each in tools:
        place, _, function = each.rpartition(":")
        if place.endswith(".py") and not Path(place).expanduser().is_file():
            message, key = f"there is no file {place}", "rollout.agent_args.tools"
            yield context.report("E419", message, (key,), found=each, fix="correct the path")
        elif not place or not function:
            yield context.report(
                "E419",
                f'"{each}" names no function',
                ("rollout.agent_args.tools",),
                found=each,
                allowed="module:function or file.py:function",
                fix=f'write "{each or "tools"}.py:function"',
            )
