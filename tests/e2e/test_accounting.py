"""Whole runs whose sessions fail at random: nothing is lost, nothing is left, every prompt is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from e2e.runs import Cli

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1700)]
TWO_NODES = Path(__file__).with_name("two_nodes.py")

FLAKY = '''
from tqppo import Trajectory
from tqppo.rollout.session import counter_seed


class Flaky:
    """Sessions of one to three trajectories; by their seeds some fail for good, some once, some return nothing."""

    def __init__(self):
        self.failed = set()

    async def run(self, prompt, llm):
        draw = counter_seed("flaky", *llm.seed_parts) % 100
        if draw < 6:
            raise RuntimeError("broken for good")
        trajectories, context = [], list(prompt.tokens)
        for turn in range(1 + draw % 3):
            done = await llm.generate(context)
            mask = [True] * len(done.tokens)
            trajectories.append(
                Trajectory(list(context), done.tokens, mask, done.logprobs, done.finish_reason, done.weight_version)
            )
            if draw < 14 and llm.seed_parts not in self.failed:
                self.failed.add(llm.seed_parts)
                raise ConnectionError("broken for once")
            context = [*context, *done.tokens]
        return [] if draw >= 97 else trajectories
'''
SETTINGS = (
    'rollout.agent="flaky.py:Flaky"',
    "rollout.max_trajectories=3",
    "rollout.max_context_tokens=64",
    "rollout.replicas=2",
    "rollout.session_retries=1",
    'rollout.on_incomplete_group="refill"',
    'algorithm.aggregate="session-mean"',
    "actor.ranks=2",
)


def read_events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.long)])
def test_random_failures_leave_no_keys_and_every_prompt_is_accounted_for(cli: Cli, steps: int) -> None:
    """The run itself ends with an error if a step or a validation leaves a key in the queue."""
    (cli.folder / "flaky.py").write_text(FLAKY)
    changes = (f"run.max_steps={steps}", "validation.interval=2", "checkpoint.interval=0")
    said = cli.run(*cli.train_arguments("mine", "grpo", *SETTINGS, *changes), timeout_s=1500)
    assert f"finished {steps} of {steps} steps" in said
    rows = [row for row in metrics.read(cli.runs / "mine" / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["groups/dispatched"] == row["groups/trained"] + row["groups/dropped"] + row["groups/failed"]
        assert row["training/num_sessions"] == 4 * row["groups/trained"]
        assert row["training/num_rows"] >= row["training/num_sessions"]
    left_out = [event for event in read_events(cli.runs / "mine") if event["event"] == "group_left_out"]
    failed = Counter(event["step"] for event in left_out)
    assert [failed[row["step"]] for row in rows] == [row["groups/failed"] for row in rows]
    assert sum(failed.values()) > 0
    assert {event["reason"] for event in left_out} <= {
        "RuntimeError: broken for good",
        "a session returned no trajectory",
    }
    assert sum(row["sessions/retried"] for row in rows) > sum(row["sessions/failed"] for row in rows)
    short = {event["step"] for event in read_events(cli.runs / "mine") if event["event"] == "short_batch"}
    assert short == {row["step"] for row in rows if row["groups/trained"] < 8}
    assert all(f"step {step} trains on" in said for step in short)


def assert_two_nodes_do_what_one_does(cli: Cli, mode: str, *settings: str) -> dict[str, list[str]]:
    """Trains on one node and on two, compares all figures and weights; returns who was on which of the two nodes."""
    (cli.folder / "flaky.py").write_text(FLAKY)
    arguments = cli.train_arguments("one", mode, *SETTINGS, "run.max_steps=3", *settings)
    cli.run(*arguments, timeout_s=800)
    arguments[arguments.index("one")] = "two"
    command = [sys.executable, str(TWO_NODES), str(cli.runs), *arguments]
    ended = subprocess.run(command, cwd=cli.folder, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = (metrics.comparable(cli.runs / name / "metrics.jsonl") for name in ("one", "two"))
    assert one == two
    assert cli.weights("one") == cli.weights("two")
    places: dict[str, list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return places


@pytest.mark.long
def test_two_nodes_give_the_metrics_and_weights_of_one(cli: Cli) -> None:
    """Two replicas and two ranks of actor and critic fill both nodes, so that tensors are stored on both."""
    places = assert_two_nodes_do_what_one_does(cli, "ppo", "critic.ranks=2")
    assert {node for nodes in places.values() for node in nodes} == {"head", "second"}


@pytest.mark.long
def test_rollout_and_actor_on_different_nodes_give_the_metrics_and_weights_of_one(cli: Cli) -> None:
    """One process fills a node: rows are stored where they are sampled, and the actor reads them from another node."""
    apart = ("cluster.colocate=false", "rollout.replicas=1", "actor.ranks=1")
    places = assert_two_nodes_do_what_one_does(cli, "grpo", *apart)
    assert len(places["RolloutWorker"]) == len(places["RankProcess"]) == 1
    assert places["RolloutWorker"] != places["RankProcess"]
    assert places["IndexActor"] == ["head"]
