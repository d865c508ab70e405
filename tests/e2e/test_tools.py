"""A run whose model may call tools, through the command line."""

from __future__ import annotations

import json

import pytest
from e2e.runs import Cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOOLS = '''
import os

def ordered(digits: str) -> str:
    """Sort digits."""
    return "".join(sorted(digits))

def crash(text: str) -> str:
    """End the process."""
    os._exit(1)
'''


@pytest.mark.long
def test_a_run_with_tools_counts_their_calls_and_tokenises_no_turn_again(cli: Cli) -> None:
    (cli.folder / "tools.py").write_text(TOOLS)
    settings = (
        "rollout.agent=tools",
        'rollout.agent_args={tools=["tools.py:ordered", "tools.py:crash"], parser="tiny", max_turns=3, workers=1}',
        "rollout.max_context_tokens=96",
        "run.max_steps=2",
        "warm_start.steps=0",
        "validation.num_prompts=4",
    )
    cli.train("mine", "grpo", *settings)
    lines = [json.loads(line) for line in (cli.runs / "mine" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "agent/turns" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["agent/turns"] >= 1
        assert line["agent/retokenized_tokens"] == 0
        assert {"tool/ordered/calls", "tool/ordered/errors", "tool/ordered/seconds"} <= line.keys()


def test_tools_that_cannot_be_loaded_are_refused_before_the_run(cli: Cli) -> None:
    (cli.folder / "tools.py").write_text("def bare(x):\n    return x\n")
    arguments = 'rollout.agent_args={tools=["tools.py:bare"]}'
    said = cli.train("mine", "grpo", "rollout.agent=tools", arguments, code=4)
    assert "argument 'x' has no annotation" in said
    assert not (cli.runs / "mine").exists()
