"""Distillation as whole runs: a student follows its teachers, a killed run resumes without asking them twice."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from e2e.runs import Cli, family, living, wait_until

from tqppo.metrics import files as metrics
from tqppo.tiny.model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def lines(cli: Cli, name: str) -> list[metrics.Line]:
    path = cli.runs / name / "metrics.jsonl"
    return metrics.read(path) if path.exists() else []


def requests(cli: Cli, name: str) -> set[bytes]:
    """The requests that the run's teacher computed. Fails if it computed one twice: SQLite then numbers it anew."""
    with closing(sqlite3.connect(cli.runs / name / "teachers" / "one.sqlite")) as base:
        rows = base.execute("SELECT rowid, key FROM scores").fetchall()
    assert sorted(number for number, _ in rows) == list(range(1, len(rows) + 1))
    return {key for _, key in rows}


def kill(process: psutil.Popen) -> None:
    started = family(process)
    process.kill()
    process.wait()
    wait_until(lambda: not living(started), lambda: f"these to end: {living(started)}", timeout_s=60)


def test_a_killed_run_resumes_with_the_same_bytes_and_asks_no_teacher_twice(cli: Cli) -> None:
    seldom = ["checkpoint.interval=3"]
    cli.train("whole", "distill", *seldom)
    process = cli.start(*cli.train_arguments("killed", "distill", *seldom))
    # Step 4 is done and the checkpoint is of step 3, so step 4 is done again.
    wait_until(lambda: len(lines(cli, "killed")) >= 5 or process.poll() is not None, "step 4", timeout_s=400)
    kill(process)
    cli.run("resume", "--checkpoint", "killed")
    killed, whole = (cli.runs / name / "metrics.jsonl" for name in ("killed", "whole"))
    assert metrics.comparable(killed) == metrics.comparable(whole)
    assert cli.weights("killed") == cli.weights("whole")
    assert requests(cli, "killed") == requests(cli, "whole")
    again = {int(line["step"] or 0): line for line in lines(cli, "killed")}[4]
    assert again["teacher/one/cache_hits"] == again["teacher/one/rows"] == 32
    assert again["teacher/one/tokens"] == 0
    last = lines(cli, "whole")[-1]
    assert {"distillation/loss", "teacher/one/latency_s/p95", "val-core/distillation/reverse_kl/mean"} <= last.keys()


@pytest.mark.long
def test_kills_at_random_moments_change_no_byte(cli: Cli) -> None:
    """Three kills, each at another moment of a step, its scoring or its save."""
    cli.train("whole", "distill")
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    moments = random.Random(seed)
    process = cli.start(*cli.train_arguments("killed", "distill"))
    saved = cli.runs / "killed" / "checkpoints" / "latest"
    for _ in range(3):
        done = len(lines(cli, "killed"))

        def is_further(process: psutil.Popen = process, done: int = done) -> bool:
            return process.poll() is not None or (saved.exists() and len(lines(cli, "killed")) > done)

        wait_until(is_further, "a step", timeout_s=400)
        time.sleep(moments.uniform(0.0, 1.0))
        if process.poll() is None:
            kill(process)
        process = cli.start("resume", "--checkpoint", "killed")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    killed, whole = (cli.runs / name / "metrics.jsonl" for name in ("killed", "whole"))
    assert metrics.comparable(killed) == metrics.comparable(whole)
    assert cli.weights("killed") == cli.weights("whole")
    assert requests(cli, "killed") == requests(cli, "whole")


@pytest.mark.long
def test_rewards_adapters_ranks_and_correction_go_together(cli: Cli) -> None:
    settings = ["distillation.task_reward=true", "distillation.coef=0.5", "model.lora_rank=4", "actor.lr=0.01"]
    settings += ["actor.gradient_checkpointing=true", "actor.ranks=2", "algorithm.correction=token"]
    cli.train("mine", "distill", *settings, "algorithm.filter_groups=true")
    found = lines(cli, "mine")[1:]
    assert len(found) == 6
    for line in found:
        assert {"actor/pg_loss", "distillation/loss", "training/filter_groups/evicted_samples"} <= line.keys()
        assert all(value is None or math.isfinite(value) for value in line.values())


@pytest.mark.long
def test_a_resume_with_another_teacher_is_refused(cli: Cli, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "teacher", seed=1)
    settings = [f'teachers.one.path="{tmp_path / "teacher"}"', "run.max_steps=1"]
    cli.train("taught", "distill", *settings)
    driver = json.loads((cli.runs / "taught" / "checkpoints" / "latest" / "driver.json").read_text())
    assert len(driver["teachers"]["one"]["fingerprint"]) == 32
    shutil.rmtree(tmp_path / "teacher")
    write_tiny_model(tmp_path / "teacher", seed=2)
    output = cli.run("resume", "--checkpoint", "taught", "--max-steps", "2", code=5)
    assert "these teachers differ from the checkpoint's: one" in output


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "reason"), [(signal.SIGKILL, "its process died"), (signal.SIGSTOP, "no answer within 10 s")]
)
def test_a_teacher_killed_or_stopped_in_mid_run_ends_it_with_its_name_and_log(
    cli: Cli, sent: signal.Signals, reason: str
) -> None:
    settings = ["teachers.one.max_restarts=0", "run.max_steps=500", "checkpoint.interval=0"]
    settings += ["distillation.timeout_s=10", "checkpoint.export=false"]
    process = cli.start(*cli.train_arguments("taught", "distill", *settings))
    wait_until(lambda: len(lines(cli, "taught")) >= 2 or process.poll() is not None, "a step", timeout_s=400)
    started = family(process)
    (teacher,) = [each for each in started if "TeacherWorker" in " ".join(each.cmdline())]  # Ray's title
    os.kill(teacher.pid, sent)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert f"teacher one, replica 0: {reason}" in output
    assert "teacher-one-0.log" in output
    wait_until(lambda: not living(started), lambda: f"these to end: {living(started)}", timeout_s=60)
