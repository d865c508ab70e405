"""Ctrl-C and SIGTERM in the middle of a run."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from e2e.runs import Cli, family, living, wait_until

from tqppo import metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def started(cli: Cli, name: str) -> subprocess.Popen[str]:
    """A run of many steps, in the middle of its training."""
    process = cli.start(*cli.train_arguments(name, "grpo", "run.max_steps=2000", "checkpoint.interval=0"))
    path = cli.runs / name / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 3, "the first steps")
    return process


def traces() -> set[str]:
    """Shared memory and Ray sessions of tqppo on this machine."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {str(path) for place in places for path in place.glob("tqppo*") if "-crash-" not in path.name}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_finishes_the_step_and_saves(cli: Cli, number: int, code: int) -> None:
    process = started(cli, "mine")
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    last = metrics.read(cli.runs / "mine" / "metrics.jsonl")[-1]["step"]
    assert (cli.runs / "mine" / "checkpoints" / f"step_{last:06d}" / "MANIFEST.json").is_file()
    cli.run("resume", "--checkpoint", "mine", "--max-steps", str(last + 2))
    assert metrics.read(cli.runs / "mine" / "metrics.jsonl")[-1]["step"] == last + 2


def test_the_second_signal_aborts_and_leaves_nothing_behind(cli: Cli) -> None:
    before = traces()
    process = started(cli, "mine")
    everything = family(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (130, 143), output
    wait_until(lambda: not living(everything), lambda: f"these to end: {living(everything)}", timeout_s=30)
    assert traces() - before == set()
    assert "Traceback" not in output
