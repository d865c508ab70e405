"""Whole runs whose processes are killed or stopped: each ends in time, with a message that names what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.runs import Cli, family, living, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]
STEPS = "run.max_steps=100000"


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    for process in cli.started:
        if process.poll() is None:
            process.kill()


def after(
    fault: signal.Signals, command: str, cli: Cli, *settings: str
) -> tuple[int, str, float, list[psutil.Process]]:
    """Train, and after some steps send the signal to the process of this name.

    Returns the exit code, the output, the seconds from the signal to the end, and the processes of the run.
    """
    process = cli.start(*cli.train_arguments("run", "ppo", STEPS, "checkpoint.interval=0", *settings))
    metrics = cli.runs / "run" / "metrics.jsonl"

    def has_steps() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return metrics.exists() and metrics.read_text().count("\n") >= 3

    wait_until(has_steps, "three steps", interval_s=0.2)
    processes = family(process)
    target = next(each for each in processes if each.name() == command or each.cmdline()[0].startswith(command))
    began = time.monotonic()
    os.kill(target.pid, fault)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output, time.monotonic() - began, processes


def events(cli: Cli) -> list[dict[str, object]]:
    return [json.loads(line) for line in (cli.runs / "run" / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("command", "words"), [("gcs_server", "control service"), ("raylet", "raylet")])
def test_a_run_without_its_ray_ends_within_seconds(cli: Cli, command: str, words: str) -> None:
    code, output, seconds, processes = after(signal.SIGKILL, command, cli)
    assert f"error: Ray is lost: {'its control service (GCS)' if command == 'gcs_server' else 'the raylet'}" in output
    assert code == 1
    assert seconds < 15, output
    assert "bug in tqppo" not in output
    assert events(cli)[-1]["exit_code"] == 1
    assert any(words in str(each.get("message")) for each in events(cli) if each["event"] == "error")
    wait_until(lambda: not living(processes), lambda: f"the end of {living(processes)}", timeout_s=10)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ray::RolloutWorker", r"error: (the rollout|loading weights of version \d+): the process died"),
        ("gcs_server", "error: Ray is lost: its control service"),
    ],
)
def test_what_ends_generation_ahead_of_training_ends_the_run(cli: Cli, command: str, words: str) -> None:
    code, output, seconds, processes = after(signal.SIGKILL, command, cli, "rollout.ahead=1", "actor.epochs=60")
    assert re.search(words, output), output
    assert code == 1
    assert seconds < 15, output
    assert "bug in tqppo" not in output
    wait_until(lambda: not living(processes), lambda: f"the end of {living(processes)}", timeout_s=10)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ray::RankProcess", r"(actor|critic)\.\w+: (actor|critic) rank 0 stands still"),
        ("ray::Estimator", "the estimator: the estimator's process stands still"),
        ("ray::RolloutWorker", "rollout-0 stands still"),
    ],
)
def test_a_process_that_is_stopped_is_named_within_a_minute(cli: Cli, command: str, words: str) -> None:
    code, output, seconds, processes = after(signal.SIGSTOP, command, cli)
    assert code == 1
    assert seconds < 60, output
    assert re.search(words, output), output
    assert "stopped" in output
    wait_until(lambda: not living(processes), lambda: f"the end of {living(processes)}", timeout_s=10)
