"""Whole runs of the agent preset: short ones, ones whose tools take a random time, and ones on genuine engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.runs import Cli, wait_until
from e2e.test_resume import kill, lines

from tqppo.metrics import files as metrics

pytestmark = pytest.mark.timeout(1500)

SLOW_TOOL = """
import random, time

from tqppo.data import lookup

def f(code: str) -> str:
    time.sleep(random.SystemRandom().random() * 0.2)
    return lookup.f(code)

f.__doc__ = lookup.f.__doc__
"""
SMALLER = ("data.batch_size=8", "actor.mini_batch_size=4", "rollout.group_size=4", "validation.num_prompts=8")


def arguments(name: str, *settings: str) -> list[str]:
    chosen = [word for setting in (*SMALLER, *settings) for word in ("--set", setting)]
    return ["train", "--preset", "grpo-agent-tiny", "--name", name, *chosen]


def step_rows(cli: Cli, name: str) -> list[dict[str, float | None]]:
    return [row for row in metrics.read(cli.runs / name / "metrics.jsonl") if row["step"]]


def assert_played(rows: list[dict[str, float | None]], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["agent/retokenized_tokens"] == 0
        assert row["training/num_sessions"] == 32
        assert row["groups/dispatched"] == row["groups/trained"] == 8
    assert sum(row["tool/f/calls"] or 0.0 for row in rows) > 0


@pytest.mark.slow
def test_the_agent_preset_plays_sessions_on_two_replicas(cli: Cli) -> None:
    cli.run(*arguments("mine", "run.max_steps=2", "rollout.replicas=2", "rollout.max_sessions=6"))
    assert_played(step_rows(cli, "mine"), 2)


@pytest.mark.slow
@pytest.mark.long
def test_random_delays_and_a_kill_change_neither_metrics_nor_weights(cli: Cli) -> None:
    """One run with the quick tool, one with a tool that takes a random time, one that is killed and resumed, too."""
    (cli.folder / "slow.py").write_text(SLOW_TOOL)
    settings = ("run.max_steps=3", "checkpoint.interval=1")
    slow = 'rollout.agent_args.tools=["slow.py:f"]'
    cli.run(*arguments("quick", *settings))
    cli.run(*arguments("slow", *settings, slow))
    killed = cli.start(*arguments("killed", *settings, slow))
    saved = cli.runs / "killed" / "checkpoints" / "latest"
    wait_until(lambda: (lines(cli, "killed") > 1 and saved.exists()) or killed.poll() is not None, "a step")
    kill(killed)
    cli.run("resume", "--checkpoint", "killed")
    expected = metrics.comparable(cli.runs / "quick" / "metrics.jsonl")
    assert_played(step_rows(cli, "slow"), 3)
    for name in ("slow", "killed"):
        assert metrics.comparable(cli.runs / name / "metrics.jsonl") == expected
        assert cli.weights(name) == cli.weights("quick")
        assert trajectories(cli.runs / name) == trajectories(cli.runs / "quick")


def trajectories(run: Path) -> list[object]:
    """What every session said, if the run wrote it down."""
    files = sorted((run / "trajectories").glob("*.jsonl"))
    return [json.loads(line)["response"] for file in files for line in file.read_text().splitlines()]


@pytest.mark.engines
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_the_agent_preset_trains_on_a_genuine_engine(cli: Cli, backend: str) -> None:
    settings = (f'rollout.backend="{backend}"', "run.max_steps=2", 'algorithm.old_logprobs="recompute"')
    settings += ("model.hidden_size=128",)  # servers need heads of 32; the preset's have 16
    cli.run(*arguments("mine", *settings), timeout_s=1400)
    rows = step_rows(cli, "mine")
    assert_played(rows, 2)
    for row in rows:  # observations and several turns included, the trainer computes what the engine sampled from
        assert (row["rollout_corr/log_ratio_max"] or 0.0) < 1e-3
