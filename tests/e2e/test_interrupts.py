"""Ctrl-C and SIGTERM in the middle of a run."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from e2e.runs import Cli, family, living, wait_until

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def started(cli: Cli, name: str) -> subprocess.Popen[str]:
    """A run of many steps, in the middle of its training."""
    process = cli.start(*cli.train_arguments(name, "grpo", "run.max_steps=2000", "checkpoint.interval=0"))
    path = cli.runs / name / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 3, "the first steps")
    return process


def traces(processes: list[psutil.Process]) -> list[str]:
    """Shared memory and Ray sessions that these left behind: named after their process, or with its number inside."""
    numbers = {str(process.pid) for process in processes}
    found = []
    for path in [*Path("/dev/shm").glob("tqppo*"), *Path(tempfile.gettempdir()).glob("tqppo*")]:
        owner = path / ".lock"
        said = owner.read_text().split() if owner.is_file() else []
        if numbers & {*path.name.split("-"), *said}:
            found.append(str(path))
    return found


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
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
    process = started(cli, "mine")
    everything = family(process)
    assert traces(everything), "a run has shared memory and a Ray session"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (130, 143), output
    wait_until(lambda: not living(everything), lambda: f"these to end: {living(everything)}", timeout_s=30)
    assert traces(everything) == []
    assert "Traceback" not in output
