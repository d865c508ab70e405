"""Generation ahead of training, on fakes that keep rows in a real queue: what is sampled when, with which weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import pytest
from trainers.fakes import FakeEngines, FakeRun, fake_run

from tqppo.data.prompts import Prompt
from tqppo.errors import CheckpointError, EngineError
from tqppo.processes.hosting import Call, failing_with, settle
from tqppo.processes.in_order import AtOnce, Background, InOrder
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.trainers.ahead import RolloutAhead
from tqppo.trainers.side_by_side import SideBySide

SMALL = ("data.batch_size=2", "rollout.group_size=2", "algorithm.old_logprobs=rollout", "run.max_steps=5")
BEHIND = "training/off_policy/versions_behind/"


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


@pytest.fixture(params=["at once", "in the background"])
def work(request: pytest.FixtureRequest) -> Iterator[InOrder]:
    work: InOrder = AtOnce() if request.param == "at once" else Background("test")
    yield work
    work.stop()
    work.join()


def run_ahead(queue: Queue, work: InOrder, ahead: int, *overrides: str, **options: Any) -> FakeRun:
    return fake_run(queue, None, *SMALL, f"rollout.ahead={ahead}", *overrides, ahead=work, **options)


def stage(run: FakeRun) -> RolloutAhead:
    assert isinstance(run.stages.rollout, RolloutAhead)
    return run.stages.rollout


def engine_calls(run: FakeRun) -> list[str]:
    return [call for call in run.log.calls if call.startswith(("load", "rollout"))]


def generated_with(run: FakeRun) -> list[int]:
    """The version of the weights that sampled each step."""
    versions, version = [], 0
    for call in engine_calls(run):
        if call.startswith("load"):
            version = int(call.split()[-1])
        else:
            versions.append(version)
    return versions


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_a_step_trains_on_groups_of_weights_that_follow_from_its_number(
    queue: Queue, work: InOrder, ahead: int
) -> None:
    run = run_ahead(queue, work, ahead)
    behind = []
    for step in range(1, 6):
        metrics = run.trainer.step(step)
        behind.append(metrics[f"{BEHIND}mean"])
        assert metrics["groups/trained"] == 2
        assert stage(run).lost(queue.list()) == []
    assert generated_with(run) == [max(0, step - 1 - ahead) for step in range(1, 6)]
    assert behind == [min(step - 1, ahead) for step in range(1, 6)]
    assert len(queue.list()) == 0  # no groups are sampled for a step after the last


def test_metrics_of_the_prompts_are_those_of_the_step_that_drew_them(queue: Queue, work: InOrder) -> None:
    run = run_ahead(queue, work, 2)
    assert [run.trainer.step(step)["drawn"] for step in range(1, 6)] == [2, 4, 6, 8, 10]


def test_a_validation_waits_and_uses_the_newest_weights(queue: Queue, work: InOrder) -> None:
    run = run_ahead(queue, work, 1)
    for step in (1, 2):
        run.trainer.step(step)
    stage(run).catch_up()
    assert engine_calls(run)[-2:] == ["rollout.generate", "load version 2"]
    for step in (3, 4, 5):
        run.trainer.step(step)
    assert generated_with(run) == [0, 0, 1, 2, 3]


def test_a_critic_that_learns_alone_leaves_no_version_behind(queue: Queue, work: InOrder) -> None:
    run = run_ahead(queue, work, 1, "mode=ppo", "critic.warmup_only_steps=2")
    behind = [run.trainer.step(step)[f"{BEHIND}max"] for step in range(1, 6)]
    assert generated_with(run) == [0, 0, 0, 0, 3]
    assert behind == [0, 0, 0, 3, 1]  # version 3 is the first; it comes two steps after version 0 was loaded


class HeldEngines(FakeEngines):
    """Engines that wait for permission before they sample."""

    may_go: threading.Event

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_go = threading.Event()
        HELD.append(self.may_go)

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Any) -> RolloutReport:
        if task.step > 1:
            assert self.may_go.wait(30)
        return super().generate(prompts, task)


HELD: list[threading.Event] = []


def test_a_step_trains_while_the_engines_sample_the_next(queue: Queue) -> None:
    work = Background("test")
    run = run_ahead(queue, work, 1, engines=HeldEngines)
    run.trainer.step(1)  # returns, although step 2 cannot be sampled yet
    assert engine_calls(run) == ["rollout.generate"]
    assert not stage(run).in_flight[2].done()
    HELD.pop().set()
    run.trainer.step(2)
    work.stop()
    work.join()


class BrokenEngines(FakeEngines):
    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Any) -> RolloutReport:
        if task.step == 3:
            raise EngineError("the engine has died")
        return super().generate(prompts, task)


def test_an_error_of_the_engines_is_that_of_the_step_and_of_every_later_one(queue: Queue) -> None:
    work = Background("test")
    run = run_ahead(queue, work, 1, engines=BrokenEngines)
    run.trainer.step(1)
    run.trainer.step(2)
    for _ in range(2):
        with pytest.raises(EngineError, match="the engine has died"):
            run.trainer.step(3)
    with pytest.raises(EngineError, match="the engine has died"):
        stage(run).settle()
    assert isinstance(work.failure.exception(1), EngineError)
    work.stop()
    work.join()


def test_a_checkpoint_holds_the_groups_in_flight_and_resumes_with_them(queue: Queue, work: InOrder) -> None:
    whole = run_ahead(queue, work, 2)
    for step in (1, 2):
        whole.trainer.step(step)
    state = json.loads(json.dumps(stage(whole).state()))
    assert [each["step"] for each in state] == [3, 4]
    rows = {key: queue.list().select([key]).tags[0] for each in state for key in each["keys"]}
    other = Queue.create("simple", local=True)
    data = queue.get(queue.list().select(rows), ["tokens", "response_mask", "rollout_logprobs", "reward"])
    other.put(list(rows), data, tags=list(rows.values()))
    resumed = run_ahead(other, AtOnce(), 2)
    stage(resumed).restore(state, 2, other)
    stage(resumed).load_weights(stage(whole).new_weights[0])  # type: ignore[index]
    metrics = [{**whole.trainer.step(step)} for step in (3, 4, 5)], [resumed.trainer.step(step) for step in (3, 4, 5)]
    for unbroken, again in zip(*metrics, strict=True):
        for name in ("groups/dispatched", "critic/score/mean", "perf/total_num_tokens", f"{BEHIND}mean"):
            assert unbroken.get(name) == again.get(name)
    assert generated_with(resumed) == [2]
    assert len(other.list()) == 0
    other.close()


def test_a_checkpoint_without_a_group_that_it_lists_or_with_rows_of_no_step_is_refused(queue: Queue) -> None:
    run = run_ahead(queue, AtOnce(), 1)
    saved = [{"step": 3, "keys": ["p4_0_0"], "metrics": {}}]
    with pytest.raises(CheckpointError, match="groups of step 3 are missing"):
        stage(run).restore(saved, 2, queue)
    queue.tag({"p4_0_0": {"uid": "p4"}, "p9_0_0": {"uid": "p9"}})
    with pytest.raises(CheckpointError, match="groups of step 2 are missing"):
        stage(run).restore(saved, 1, queue)
    with pytest.raises(CheckpointError, match="1 rows of no step, such as p9_0_0"):
        stage(run).restore(saved, 2, queue)


def test_rows_that_a_step_leaves_behind_are_found_while_others_are_in_flight(queue: Queue, work: InOrder) -> None:
    run = run_ahead(queue, work, 1)
    run.trainer.step(1)
    queue.tag({"p0_0_0": {"uid": "p0"}})  # of step 1, which is over
    stage(run).settle()
    assert len(queue.list()) == 1 + 4
    assert stage(run).lost(queue.list()) == ["p0_0_0"]


def test_stages_at_the_same_time_end_with_an_error_of_the_engines() -> None:
    """They run in threads of their own, whose waits must end as those of the step do."""
    failure: Future[NoReturn] = Future()
    never: Call[None] = Call(Future(), lambda: None)

    def waits() -> Metrics:
        settle([never], 60.0)
        return {}

    threading.Timer(0.2, lambda: failure.set_exception(EngineError("the engine has died"))).start()
    with failing_with(failure), pytest.raises(EngineError, match="the engine has died"):
        SideBySide(at_once=True).updates(waits, waits)
