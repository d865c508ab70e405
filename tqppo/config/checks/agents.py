"""Checks of agent loops: the loop, its arguments and its tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tqppo.builtin import AGENT_ARGUMENTS, AGENTS
from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read.nearest import did_you_mean


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
    known = AGENT_ARGUMENTS.get(rollout.agent, {})
    unknown = [name for name in rollout.agent_args if known and name not in known]
    for name in unknown:
        yield context.report(
            "E418",
            f"the agent {rollout.agent} has no argument {name}",
            (f"rollout.agent_args.{name}", "rollout.agent"),
            found=name,
            allowed=", ".join(known),
            fix=did_you_mean(name, list(known)) or f"delete rollout.agent_args.{name}",
            on_key=True,
        )
    for name, value in rollout.agent_args.items():
        if name in known and not known[name].fits(value):
            yield context.report(
                "E421",
                f"the agent {rollout.agent} cannot use {name} = {value!r}",
                (f"rollout.agent_args.{name}", "rollout.agent"),
                allowed=known[name].wanted,
                fix=f"set rollout.agent_args.{name} to {known[name].wanted}",
            )
    if not unknown:
        yield from _missing(context)


NEEDED = {  # agent loop → the argument without which it cannot run, and an example
    "tools": ("tools", '["tools.py:calculate"]'),
    "rewrite": ("tools", '["tools.py:calculate"]'),
    "environment": ("environment", '"game.py:Game"'),
}


def _missing(context: Context) -> Iterator[Diagnostic]:
    rollout = context.config.rollout
    name, example = NEEDED.get(rollout.agent, ("", ""))
    if name and name not in rollout.agent_args:
        yield context.report(
            "E419",
            f"the agent {rollout.agent} needs rollout.agent_args.{name}",
            ("rollout.agent_args", "rollout.agent"),
            allowed=AGENT_ARGUMENTS[rollout.agent][name].wanted,
            fix=f"set rollout.agent_args.{name} = {example}",
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


@check("rollout.agent", "rollout.agent_args")
def tools_exist(context: Context) -> Iterator[Diagnostic]:
    """Tools are named, and their files are there. `--probe` imports them."""
    rollout = context.config.rollout
    tools = rollout.agent_args.get("tools", ())
    if rollout.agent not in ("tools", "rewrite") or not AGENT_ARGUMENTS["tools"]["tools"].fits(tools):
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
