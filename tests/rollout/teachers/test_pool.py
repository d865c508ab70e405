"""Teachers as real processes: they agree, they are small to send, and dead or stopped ones are noticed in time."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray import cloudpickle

from tqppo.data.prompts import Prompt
from tqppo.devices.seats import NO_CPU
from tqppo.errors import CheckpointError, EngineError, PreflightError
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.protocols import EngineSpec, Sampling
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.teachers.pool import Routing, TeacherPool, TeacherSetup, check_agreement
from tqppo.rollout.teachers.worker import ReadyTeacher, TeacherSpec
from tqppo.rollout.worker import RolloutSpec

MakePool = Callable[..., TeacherPool]


@pytest.fixture(scope="module")
def queue(local_ray: None) -> Iterator[Queue]:
    made = Queue.create("simple", budget_bytes=16 << 20)
    yield made
    made.close()


@pytest.fixture(scope="module")
def student(queue: Queue, tiny_model: Path) -> Iterator[RolloutPool]:
    engine = EngineSpec(model=str(tiny_model), max_context_tokens=64)
    spec = RolloutSpec("embedded", engine, str(tiny_model), ScorerSpec(function="exact_match"))
    made = RolloutPool(spec, queue, endpoints=[], replicas=1, timeout_s=120)
    made.start(RayLauncher(), [NO_CPU])
    made.ready()
    yield made
    made.close()


@pytest.fixture
def make_pool(queue: Queue, tiny_model: Path, tmp_path: Path) -> Iterator[MakePool]:
    pools: list[TeacherPool] = []

    def make(
        *, replicas: int = 1, restarts: int = 0, model: Path = tiny_model, drops: bool = False, timeout_s: float = 4.0
    ) -> TeacherPool:
        engine = EngineSpec(str(model), max_context_tokens=64, max_restarts=restarts, log_dir=str(tmp_path / "logs"))
        spec = TeacherSpec("math", "embedded", engine)
        setup = TeacherSetup(spec, replicas=replicas, seats=(NO_CPU,) * replicas, timeout_s=timeout_s, retries=3)
        made = TeacherPool([setup], queue, Routing(drops_groups=drops))
        pools.append(made)
        made.start(RayLauncher())
        made.ready()
        return made

    yield make
    for pool in pools:
        pool.close()


def generate(student: RolloutPool, teachers: TeacherPool, uid: str = "p0") -> dict[str, float]:
    student.use_teachers(teachers.routes())
    task = Assignment(seed=0, step=1, group_size=2, sampling=Sampling(max_new_tokens=4))
    return student.generate([(0, Prompt(uid, 0, [1, 2, 3], "A", "sort", {}, "abc"))], task).metrics()


def process_of(pool: TeacherPool, replica: int = 0) -> psutil.Process:
    return psutil.Process(pool.replicas[0][replica].pid)


def test_rows_have_their_teachers_columns_when_the_rollout_returns(
    student: RolloutPool, make_pool: MakePool, queue: Queue
) -> None:
    metrics = generate(student, make_pool(replicas=2))
    assert (metrics["teacher/math/requests"], metrics["teacher/math/rows"]) == (1.0, 2.0)
    rows = queue.list(where={"is_prompt": None})
    columns = queue.get(rows, ["teacher_logprobs", "rollout_logprobs"])
    for taught, sampled in zip(columns["teacher_logprobs"].unbind(), columns["rollout_logprobs"].unbind(), strict=True):
        assert taught[2:-1, 0].tolist() == pytest.approx(sampled.tolist(), abs=1e-4)  # the same weights
    queue.clear(queue.list())


def test_what_a_replica_is_sent_is_small(make_pool: MakePool, queue: Queue) -> None:
    pool = make_pool()
    for setup in pool.setups:
        for spec in setup.specs():
            assert len(pickle.dumps(spec)) <= 16 * 1024
    assert len(cloudpickle.dumps((pool.setups[0].specs()[0], queue))) <= 16 * 1024


def test_a_killed_teacher_is_an_error_in_seconds_with_its_log(
    student: RolloutPool, make_pool: MakePool, queue: Queue
) -> None:
    pool = make_pool()
    process_of(pool).kill()
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"teacher math, replica 0: its process died(.|\n)*the end of .*teacher-math-0"
    ):
        generate(student, pool)
    assert time.monotonic() - began < 30
    queue.clear(queue.list())


def test_a_killed_teacher_that_may_be_restarted_answers_after_all(
    student: RolloutPool, make_pool: MakePool, queue: Queue
) -> None:
    pool = make_pool(restarts=1, timeout_s=100.0)
    process_of(pool).kill()
    metrics = generate(student, pool)
    assert (metrics["teacher/math/rows"], metrics["teacher/math/failures"]) == (2.0, 0.0)
    queue.clear(queue.list())


def test_a_stopped_teacher_is_an_error_at_its_deadline(student: RolloutPool, make_pool: MakePool, queue: Queue) -> None:
    pool = make_pool()
    stopped = process_of(pool)
    os.kill(stopped.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(EngineError, match=r"teacher math, replica 0: no answer within 4 s"):
            generate(student, pool)
        assert time.monotonic() - began < 20
    finally:
        os.kill(stopped.pid, signal.SIGKILL)
    queue.clear(queue.list())


def test_or_its_groups_are_dropped(student: RolloutPool, make_pool: MakePool, queue: Queue) -> None:
    pool = make_pool(drops=True)
    process_of(pool).kill()
    metrics = generate(student, pool)
    assert metrics["teacher/math/dropped_groups"] == 1.0
    (marker,) = queue.list().tags
    assert marker["status"] == "dropped"
    queue.clear(queue.list())


def test_a_resume_with_other_teachers_is_refused(make_pool: MakePool, tiny_model: Path, tmp_path: Path) -> None:
    pool = make_pool()
    saved = pool.state()
    pool.check_state(saved)
    copy = shutil.copytree(tiny_model, tmp_path / "other")
    config = copy / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(CheckpointError, match=r"these teachers differ from the checkpoint's: math \(.*other\)"):
        make_pool(model=copy).check_state(saved)
    with pytest.raises(CheckpointError, match="code, math"):
        pool.check_state({"code": saved["math"]})


SETUP = TeacherSetup(TeacherSpec("math", "embedded", EngineSpec("m", 64)), tolerance=0.01)
READY = ReadyTeacher("f", [[-1.0, -2.0], [-1.0, -2.0]], 0, "", 1)


def test_replicas_that_say_the_same_are_accepted() -> None:
    check_agreement(SETUP, [READY, replace(READY, probes=[[-1.005, -2.0], [-1.0, -2.0]])])


def test_a_replica_that_contradicts_itself_is_refused() -> None:
    noisy = replace(READY, probes=[[-1.0, -2.0], [-1.5, -2.0]])
    with pytest.raises(PreflightError, match=r"replica 1: it scored the same tokens twice, .* differ by 0\.25"):
        check_agreement(SETUP, [READY, noisy])


def test_replicas_with_other_models_are_refused() -> None:
    with pytest.raises(PreflightError, match="replicas 0 and 1 have different model files"):
        check_agreement(SETUP, [READY, replace(READY, fingerprint="g")])
    other = replace(READY, probes=[[-3.0, -2.0], [-3.0, -2.0]])
    with pytest.raises(PreflightError, match="replicas 0 and 1 differ by 1 in the mean"):
        check_agreement(SETUP, [READY, other])


def test_without_files_a_teacher_is_known_by_what_it_says(queue: Queue) -> None:
    pool = TeacherPool([SETUP], queue, Routing())
    pool.replicas = [[replace(READY, fingerprint="")]]
    pool.check_state({"math": {"fingerprint": "", "probe": [-1.001, -2.0]}})
    with pytest.raises(CheckpointError, match="these teachers differ"):
        pool.check_state({"math": {"fingerprint": "", "probe": [-1.2, -2.0]}})
