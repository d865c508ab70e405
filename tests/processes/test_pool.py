from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tqppo.errors import DataError
from tqppo.processes import lifeline
from tqppo.processes.pool import ProcessPool, SampleFailed
from tqppo.rewards.scorer import FunctionSpec, process_spec

TIMEOUT_S = 3.0
FUNCTION = """
import os, time

def daemon(note):
    \"\"\"Leave a process behind, in a session of its own, that holds all descriptors and whose parent is gone.\"\"\"
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(note, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not (os.path.exists(note) and open(note).read()):
        time.sleep(0.01)

def grade(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "die":
        os._exit(3)
    if solution_str.startswith("daemon"):
        daemon(ground_truth)
    if solution_str == "daemon, then die":
        os._exit(3)
    if solution_str == "daemon, then hang":
        time.sleep(600)
    return os.getpid()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    (tmp_path / "grades.py").write_text(FUNCTION)
    made = ProcessPool(process_spec(FunctionSpec(f"{tmp_path}/grades.py:grade", {}, 1.0, "grade"), TIMEOUT_S), 1)
    yield made
    made.close()


def sample(solution: str, answer: str = "") -> dict[str, object]:
    return {"source": "test", "solution": solution, "answer": answer, "extra": {}}


def is_alive(pid: int) -> bool:
    return pid in lifeline._live()


def test_samples_share_a_process_and_a_dead_one_is_replaced(pool: ProcessPool) -> None:
    first = pool.call(sample("a"))
    assert pool.call(sample("b")) == first
    with pytest.raises(SampleFailed, match=r"its process died \(exit code 3\)"):
        pool.call(sample("die"))
    assert pool.call(sample("c")) != first


@pytest.mark.parametrize("then", ["hang", "die"])
def test_a_process_that_a_function_detached_ends_with_the_deadline_or_the_death_of_its_sample(
    pool: ProcessPool, tmp_path: Path, then: str
) -> None:
    note, began = tmp_path / "pid", time.monotonic()
    with pytest.raises(SampleFailed, match=r"took longer|exit code 3"):
        pool.call(sample(f"daemon, then {then}", str(note)))
    assert time.monotonic() - began < TIMEOUT_S + 3
    assert not is_alive(int(note.read_text()))
    assert isinstance(pool.call(sample("next")), int)


def test_a_process_that_a_function_detached_ends_with_the_pool(pool: ProcessPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert isinstance(pool.call(sample("daemon", str(note))), int)
    assert is_alive(int(note.read_text()))
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 3
    assert not is_alive(int(note.read_text()))


OWNER = """
import os, sys, time
from tqppo.processes import lifeline
from tqppo.processes.pool import ProcessPool
from tqppo.rewards.scorer import FunctionSpec, process_spec
pool = ProcessPool(process_spec(FunctionSpec(sys.argv[1], {}, 1.0, "grade"), 60.0), 1)
pool.call({"source": "test", "solution": "daemon", "answer": sys.argv[2], "extra": {}})
print("done", flush=True)
time.sleep(600)
"""


def test_a_process_that_a_function_detached_ends_with_a_killed_owner(tmp_path: Path) -> None:
    (tmp_path / "grades.py").write_text(FUNCTION)
    note = tmp_path / "pid"
    command = [sys.executable, "-c", OWNER, f"{tmp_path}/grades.py:grade", str(note)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "done\n"
        owner.kill()
    deadline = time.monotonic() + 5
    while is_alive(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(note.read_text()))


def test_a_sample_that_a_stopped_process_does_not_read_ends_at_its_deadline(pool: ProcessPool) -> None:
    process = pool.call(sample("a"))
    assert isinstance(process, int)
    os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(SampleFailed, match="took longer"):
        pool.call(sample("x" * 1_000_000))
    assert time.monotonic() - began < TIMEOUT_S + 3
    assert pool.call(sample("b")) != process


def test_a_closed_pool_refuses_samples(pool: ProcessPool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(SampleFailed, match="closed"):
        pool.call(sample("a"))


def test_a_function_that_cannot_be_imported_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="cannot import no_such_module"):
        ProcessPool(process_spec(FunctionSpec("no_such_module:f", {}, 1.0, "f"), 10.0), 1)
