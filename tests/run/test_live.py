"""Where a step's time went, and what a validation makes of its rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tqppo.data.prompts import Prompt
from tqppo.errors import CheckpointError, OutOfSpace
from tqppo.processes.in_order import AtOnce
from tqppo.protocols import Sampling
from tqppo.queue.client import Queue
from tqppo.rollout.assignment import Assignment
from tqppo.run.live import LiveRun, Validator, timings
from tqppo.space import Digest
from tqppo.trainers.ahead import PromptsInFlight, RolloutAhead
from tqppo.trainers.side_by_side import Clock
from tqppo.workers.compute.learner import Learner
from tqppo.workers.compute.saving import SavedPart


def test_the_step_is_the_wall_clock_and_the_rest_is_other() -> None:
    found = timings({"timing_s/gen": 1.0, "timing_s/update_actor": 2.0}, 4.0, 800.0)
    assert found["timing_s/step"] == 4.0
    assert found["timing_s/other"] == 1.0
    assert found["perf/throughput"] == 200.0
    parts = [value for name, value in found.items() if name.startswith("timing_s/") and name != "timing_s/step"]
    assert sum(parts) == pytest.approx(found["timing_s/step"])


def test_a_clock_adds_up_what_a_stage_does_several_times() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.time("update_weights"):
            pass
    assert list(clock.take()) == ["timing_s/update_weights"]
    assert clock.take() == {}


class Answers:
    """Engines that answer every prompt twice: sampled wrongly, greedily right."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def generate(self, prompts: Any, task: Assignment) -> None:
        for order, prompt in prompts:
            for session, score in ((0, 0.0), (1, 1.0)):
                tags = {"uid": prompt.uid, "session": session, "trajectory": 0, "order": order, "source": "sums"}
                tags |= {"reward": score, "answer": str(score), "last": True}
                self.queue.tag({f"{prompt.uid}_{session}_0": tags}, partition=task.partition)


def test_a_validation_reports_sampled_and_greedy_apart_and_leaves_no_rows() -> None:
    queue = Queue.create("simple", local=True)
    prompts = [Prompt(f"p{i}", i, [1], "", "sums", {}, f"{i}+{i}?") for i in range(3)]
    task = Assignment(0, 0, 1, Sampling(), partition="val", greedy=True, keep_tensors=False)
    pool: Any = Answers(queue)
    validator = Validator(pool, queue, Clock(), prompts, task)
    found = validator.run()
    assert validator.example == "'0+0?' → '1.0', reward 1"
    assert found["val-core/sums/reward/mean@1"] == 0.0
    assert found["val-core/sums/reward/greedy"] == 1.0
    assert found["val-aux/failed_sessions"] == 0
    assert len(queue.list("val")) == 0
    assert Validator(pool, queue, Clock(), [], task).run() == {}
    queue.close()


PARTS = (SavedPart({"part-1": Digest(1, "a")}), SavedPart({"part-2": Digest(2, "b")}))
WRITTEN = {
    f"{role}/{name}": each for role in ("actor", "critic") for part in PARTS for name, each in part.files.items()
}


class Elsewhere:
    """A role of two ranks, the second of which says what it finds when it is to save."""

    def __init__(self, says: str = "") -> None:
        self.says, self.folders = says, list[Path]()

    def call_each(self, method: Any, folder: str) -> list[SavedPart]:
        assert method is Learner.try_save
        assert Path(folder).is_dir(), "the driver makes it: a worker that finds no room for it would end"
        self.folders.append(Path(folder))
        return [PARTS[0], SavedPart(PARTS[1].files, self.says)]


def live(actor: Any, critic: Any) -> LiveRun:
    nothing: Any = None
    queue = Queue.create("simple", local=True)
    return LiveRun(queue, actor, critic, nothing, nothing, nothing, nothing, nothing)


def test_a_role_that_finds_no_room_ends_the_save_and_not_the_run(tmp_path: Path) -> None:
    actor, critic = Elsewhere(), Elsewhere("no room for the critic")
    run = live(actor, critic)
    with pytest.raises(OutOfSpace, match="no room for the critic"):
        run.save(tmp_path / "one")
    assert [path.name for path in actor.folders + critic.folders] == ["actor", "critic"]
    assert not (tmp_path / "one" / "queue").exists()
    critic.says = ""
    assert run.save(tmp_path / "two") == WRITTEN
    assert (tmp_path / "two" / "queue" / "queue.json").is_file()
    run.queue.close()


class Writing(Elsewhere):
    """A role of two ranks that save in the background; the second has written after a number of looks."""

    looks = 1

    def call_each(self, method: Any, folder: str) -> list[SavedPart]:
        assert method is Learner.begin_save
        assert Path(folder).is_dir()
        return []

    def ask_each(self, method: Any, wait_s: float) -> list[SavedPart | None]:
        assert method is Learner.saved
        self.looks -= 1
        return [PARTS[0], None if self.looks >= 0 else SavedPart(PARTS[1].files, self.says)]


def test_parts_are_complete_when_every_rank_of_every_role_has_written(tmp_path: Path) -> None:
    actor, critic = Writing(), Writing("no room for the critic")
    run = live(actor, critic)
    saving = run.begin_save(tmp_path / "one")
    assert saving.written(0.0) is None
    with pytest.raises(OutOfSpace, match="no room for the critic"):
        saving.written(0.0)
    critic.says = ""
    assert saving.written(0.0) == WRITTEN
    assert (tmp_path / "one" / "queue" / "queue.json").is_file()
    actor.looks, critic.looks, critic.says = 1, 0, "no room"
    assert saving.written(0.0) is None, "while one rank writes, its folder must stay"
    run.queue.close()


class Resting:
    """A sampler that takes any state."""

    def restore(self, state: Any) -> None:
        if not state["epoch"] >= 0:
            raise AssertionError("unreachable")


@pytest.mark.parametrize("state", [{}, {"data": {}}, {"data": None}, {"data": {"epoch": "x"}}, {"data": {"epoch": 1}}])
def test_a_driver_s_state_that_no_run_saves_is_an_error_of_the_checkpoint(state: dict[str, Any]) -> None:
    stages = SimpleNamespace(advantages=SimpleNamespace(controller=None))
    parts: Any = SimpleNamespace(sampler=Resting(), stages=stages, ahead=None)
    with pytest.raises(CheckpointError, match=r"driver\.json of the checkpoint is not what a run saves"):
        LiveRun._restore_driver(parts, state, 1)


@pytest.mark.parametrize("saved", [None, {}, {"ahead": None}, {"ahead": 3}, {"ahead": [3]}, {"ahead": [{"step": 2}]}])
def test_groups_in_flight_that_no_run_saves_are_an_error_of_the_checkpoint(saved: dict[str, Any] | None) -> None:
    queue = Queue.create("simple", local=True)
    rollout = SimpleNamespace(assignment=Assignment(0, 0, 1, Sampling()))
    ahead = RolloutAhead(cast(Any, rollout), PromptsInFlight(cast(Any, None)), AtOnce(), Clock(), 1, 9)
    stages = SimpleNamespace(advantages=SimpleNamespace(controller=None))
    parts: Any = SimpleNamespace(sampler=Resting(), stages=stages, ahead=ahead, queue=queue)
    with pytest.raises(CheckpointError, match=r"driver\.json of the checkpoint is not what a run saves"):
        LiveRun._restore_driver(parts, {"data": {"epoch": 1}, **(saved or {})}, 1)
    queue.close()
