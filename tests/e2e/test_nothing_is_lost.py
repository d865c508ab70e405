"""What must not cost a user anything: damaged files, two processes on one run, a run without checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from disks import can_mount
from e2e.runs import Cli, wait_until
from run.rehearsal import contents

from tqppo.metrics import files as metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOW_REWARD = """
import time
def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.05)
    return 0.5
"""


@pytest.mark.long
def test_damaged_files_are_named_and_nothing_is_touched(cli: Cli) -> None:
    cli.train("mine", "grpo", "run.max_steps=2")
    run = cli.runs / "mine"
    config, resume = run / "config.resolved.toml", ["resume", "--checkpoint", "mine", "--max-steps", "4"]
    whole = config.read_text()
    for damage in ("", whole[: len(whole) // 2]):
        config.write_text(damage)
        before = contents(run)
        said = cli.run(*resume, code=5)
        assert f"{config} is corrupt" in said
        assert contents(run) == before
    config.write_text(whole)
    for checkpoint in (run / "checkpoints").glob("step_*"):
        (checkpoint / "driver.json").write_text("{}")
    before = contents(run)
    said = cli.run(*resume, code=5)
    assert "no checkpoint in" in said
    assert all(f"step_{step:06d}/driver.json is corrupt" in said for step in (1, 2))
    assert f"tqppo train --config {config} --name" in said
    assert contents(run) == before
    again = cli.run("train", "--config", str(config), "--name", "again")  # starting over is a run of its own
    assert "finished 2 of 2 steps" in again


def test_a_live_run_cannot_be_resumed_and_goes_on(cli: Cli) -> None:
    (cli.folder / "slow.py").write_text(SLOW_REWARD)
    live = cli.start(*cli.train_arguments("mine", "grpo", 'reward.function="slow.py:slow"', "run.max_steps=2000"))
    saved = cli.runs / "mine" / "checkpoints" / "latest"
    wait_until(lambda: saved.exists() or live.poll() is not None, "a checkpoint")
    said = cli.run("resume", "--checkpoint", "mine", code=4)
    assert f"is in use by process {live.pid} on" in said
    written = cli.runs / "mine" / "metrics.jsonl"
    done = len(metrics.read(written))
    wait_until(lambda: len(metrics.read(written)) > done or live.poll() is not None, "another step")
    live.send_signal(signal.SIGINT)
    output, _ = live.communicate(timeout=300)
    assert live.returncode == 130, output
    steps = [row["step"] for row in metrics.read(written)]
    assert len(steps) > done
    assert steps == list(range(len(steps)))


def test_a_run_without_a_checkpoint_is_not_started_over_in_silence(cli: Cli) -> None:
    said = cli.train("mine", "grpo", "run.max_steps=2", "checkpoint.interval=0", "checkpoint.save_on_exit=false")
    assert "finished 2 of 2 steps" in said
    assert "tqppo resume" not in said
    before = contents(cli.runs / "mine")
    said = cli.run("resume", "--checkpoint", "mine", "--max-steps", "4", code=5)
    assert "there is no checkpoint in" in said
    assert contents(cli.runs / "mine") == before


# Fills the file system of the runs, which is a small one, once there is a checkpoint.
FILLING_REWARD = """
import os, pathlib
def fills(data_source, solution_str, ground_truth, extra_info=None):
    runs = pathlib.Path(os.environ["TQPPO__RUN__DIR"])
    size = os.statvfs(runs)
    if size.f_blocks * size.f_frsize < 1 << 26 and list(runs.glob("*/checkpoints/latest")):
        try:
            with open(runs / "filler", "ab", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
        except OSError:
            pass
    return 0.5
"""
# Runs a command with 40 MB for the runs, and keeps them when it has ended.
ON_A_SMALL_DISK = (
    'mount -t tmpfs -o size=40m none "$0"; "$@"; code=$?; rm "$0/filler"; cp -a "$0/." "$0-kept"; exit $code'
)


@pytest.mark.long
@pytest.mark.skipif(not can_mount(), reason="needs root, for a file system of 40 MB")
@pytest.mark.parametrize(
    ("policy", "in_process", "said"),
    [
        ("stop", "false", ["error: the ", "not written: "]),
        (
            "continue",
            "true",
            [
                "the metrics of step 6 wait for room on the disk, training goes on",
                "the checkpoint of step 6 was not written, training goes on: ",
                "error: the model was not exported: ",
            ],
        ),
    ],
)
def test_a_full_disk_is_named_and_costs_only_the_steps_after_the_last_checkpoint(
    cli: Cli, policy: str, in_process: str, said: list[str]
) -> None:
    (cli.folder / "fills.py").write_text(FILLING_REWARD)
    cli.runs.mkdir()
    cli.prefix = ["unshare", "-m", "sh", "-c", ON_A_SMALL_DISK, str(cli.runs)]
    settings = [f'checkpoint.on_full_disk="{policy}"', f"cluster.in_process={in_process}", "checkpoint.interval=2"]
    output = cli.train("mine", "grpo", 'reward.function="fills.py:fills"', *settings, code=1)
    assert all(each in output for each in said), output
    assert f"{cli.runs / 'mine'} has no room for" in output
    assert "bug in tqppo" not in output
    cli.prefix = []
    cli.runs.rmdir()
    Path(f"{cli.runs}-kept").rename(cli.runs)
    run = cli.runs / "mine"
    assert [row["step"] for row in metrics.read(run / "metrics.jsonl")][:3] == [
        0,
        1,
        2,
    ]  # a page may have room for more
    assert [path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink()] == ["step_000002"]
    cli.run("resume", "--checkpoint", "mine")
    assert [row["step"] for row in metrics.read(run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]
    assert (run / "export" / "hf" / "model.safetensors").exists()
