"""Distillation as whole runs: a student follows its teachers, a killed run resumes without asking them twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
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


def kill(process: psutil.Popen) -> None:
    started = family(process)
    process.kill()
    process.wait()
    wait_until(lambda: not living(started), lambda: f"these to end: {living(started)}", timeout_s=60)


def test_a_killed_run_resumes_with_the_same_bytes_and_asks_no_teacher_twice(cli: Cli) -> None:
    seldom = ["checkpoint.interval=2"]
    cli.train("whole", "distill", *seldom)
    process = cli.start(*cli.train_arguments("killed", "distill", *seldom))
    # Step 3 is done and the checkpoint is of step 2, so step 3 is done again.
    wait_until(lambda: len(lines(cli, "killed")) >= 4 or process.poll() is not None, "step 3", timeout_s=400)
    kill(process)
    cli.run("resume", "--checkpoint", "killed")
    killed, whole = (cli.runs / name / "metrics.jsonl" for name in ("killed", "whole"))
    assert metrics.comparable(killed) == metrics.comparable(whole)
    assert cli.weights("killed") == cli.weights("whole")
    again = {int(line["step"] or 0): line for line in lines(cli, "killed")}[3]
    assert again["teacher/one/cache_hits"] == again["teacher/one/rows"] == 32
    assert again["teacher/one/tokens"] == 0
    first, last = lines(cli, "whole")[0], lines(cli, "whole")[-1]
    assert last["val-core/distillation/reverse_kl/mean"] < first["val-core/distillation/reverse_kl/mean"]


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
    assert "other teachers than those of the checkpoint: one" in output


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
