"""Groups reach the queue in chunks that depend on the step's prompts alone, each row with its teacher's columns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from rollout.teachers.replicas import FakeReplica, route

from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, EngineError
from tqppo.metrics.validation import reverse_kl
from tqppo.protocols import Sampling
from tqppo.queue.client import Queue
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.chunks import ChunkWriter
from tqppo.rollout.loops.base import Trajectory
from tqppo.rollout.teachers import client as client_module
from tqppo.rollout.teachers.client import TeacherClient, TeacherRoutes
from tqppo.rollout.writer import Outcome


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAUSE_S", 0.0)


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


def make_prompts(count: int, sources: Sequence[str] = ("sort",)) -> list[Prompt]:
    return [Prompt(f"p{i}", i, [1, 2, 3], "A", sources[i % len(sources)], {}, "abc") for i in range(count)]


def outcome(session: int, trajectories: int = 1, response: int = 2) -> Outcome:
    one = Trajectory([1, 2, 3], [5] * response, [True] * response, [-0.5] * response, "stop", 0)
    return Outcome(session, [one] * trajectories, 1.0, "A", {})


def write(
    queue: Queue,
    prompts: Sequence[Prompt],
    routes: TeacherRoutes,
    *,
    order: Sequence[int] | None = None,
    trajectories: int = 1,
    own_prompt: Any = lambda template, prompt: [9, 9],
    student: Any = None,
    **task: Any,
) -> TeacherClient:
    """Add each prompt's group, in the order in which they finish."""
    assignment = Assignment(**{"seed": 0, "step": 1, "group_size": 2, "sampling": Sampling(), **task})

    async def run() -> TeacherClient:
        client = TeacherClient(routes)
        writer = ChunkWriter(queue, assignment, prompts, client, own_prompt=own_prompt, student_logprobs=student)
        for place in order or range(len(prompts)):
            outcomes = [outcome(session, trajectories) for session in range(assignment.num_sessions)]
            await writer.add(place, prompts[place], outcomes, [])
        await writer.finish()
        return client

    return asyncio.run(run())


def asked(replica: FakeReplica) -> list[tuple[str, ...]]:
    return [call.batch.keys for call in replica.calls]


def markers(queue: Queue) -> dict[str, Any]:
    found = queue.list(where={"is_prompt": True})
    return dict(zip(found.keys, found.tags, strict=True))


def test_batches_are_the_same_whatever_finishes_first(queue: Queue) -> None:
    prompts = make_prompts(7)
    batches = []
    for seed in range(3):
        replica = FakeReplica()
        order = random.Random(seed).sample(range(7), 7)
        write(queue, prompts, TeacherRoutes((route("t", replica),), batch_rows=5), order=order)
        batches.append(sorted(asked(replica)))
        queue.clear(queue.list())
    assert batches[0] == batches[1] == batches[2]
    assert batches[0][0] == ("p0_0_0", "p0_1_0", "p1_0_0", "p1_1_0")
    assert [len(keys) for keys in batches[0]] == [4, 4, 4, 2]


def test_every_row_of_a_session_is_scored_and_carries_the_place_of_its_teacher(queue: Queue) -> None:
    one, two = FakeReplica(), FakeReplica()
    routes = TeacherRoutes((route("a", one, match=("x",)), route("b", two, index=1, match=("y",))), batch_rows=64)
    client = write(queue, make_prompts(3, ["x", "y"]), routes, trajectories=2)
    assert [len(keys) for keys in asked(one)] == [8]
    assert asked(two) == [tuple(f"p1_{session}_{number}" for session in (0, 1) for number in (0, 1))]
    assert {tags["status"] for tags in markers(queue).values()} == {"finished"}
    rows = queue.list(where={"is_prompt": None}).in_order()
    index = queue.get(rows, ["teacher_index"])["teacher_index"]
    assert index.tolist() == [0] * 4 + [1] * 4 + [0] * 4
    assert client.report.teachers["a"].rows == 8


def test_a_chunk_is_scored_while_others_are_still_being_sampled(queue: Queue) -> None:
    replica, prompts = FakeReplica(), make_prompts(2)
    assignment = Assignment(seed=0, step=1, group_size=2, sampling=Sampling())

    async def run() -> None:
        client = TeacherClient(TeacherRoutes((route("t", replica),), batch_rows=2))
        writer = ChunkWriter(queue, assignment, prompts, client, own_prompt=None, student_logprobs=None)  # type: ignore[arg-type]
        await writer.add(1, prompts[1], [outcome(0), outcome(1)], [])
        assert asked(replica) == [("p1_0_0", "p1_1_0")]
        assert list(markers(queue)) == ["p1"]
        await writer.add(0, prompts[0], [outcome(0), outcome(1)], [])

    asyncio.run(run())
    assert sorted(markers(queue)) == ["p0", "p1"]


def test_a_failing_teacher_ends_the_rollout_with_its_name(queue: Queue) -> None:
    with pytest.raises(EngineError, match="teacher t, replica 0: its process died"):
        write(queue, make_prompts(1), TeacherRoutes((route("t", FakeReplica("dead")),)))
    assert markers(queue) == {}


def test_or_its_groups_are_dropped_and_counted_and_the_others_stay(queue: Queue) -> None:
    bad, good = route("bad", FakeReplica("dead"), match=("x",)), route("good", FakeReplica(), index=1, match=("y",))
    client = write(queue, make_prompts(4, ["x", "y"]), TeacherRoutes((bad, good), drops_groups=True))
    found = markers(queue)
    assert {uid: tags["status"] for uid, tags in found.items()} == {
        **dict.fromkeys(["p0", "p2"], "dropped"),
        **dict.fromkeys(["p1", "p3"], "finished"),
    }
    assert found["p0"]["error"].startswith("teacher bad, replica 0")
    assert {key[:2] for key in queue.list(where={"is_prompt": None}).keys} == {"p1", "p3"}
    metrics = client.report.metrics()
    assert (metrics["teacher/bad/dropped_groups"], metrics["teacher/bad/failures"]) == (2.0, 1.0)


def test_a_prompt_that_no_teacher_scores_is_an_error_in_training_only(queue: Queue) -> None:
    routes = TeacherRoutes((route("t", FakeReplica(), match=("x",)),))
    with pytest.raises(DataError, match="no teacher scores rows"):
        write(queue, make_prompts(1, ["y"]), routes)
    write(queue, make_prompts(1, ["y"]), routes, keep_tensors=False, partition="val")
    assert "teacher_kl" not in queue.list("val").tags[0]


def test_a_teachers_own_prompt_travels_with_the_call(queue: Queue) -> None:
    replica = FakeReplica()
    write(queue, make_prompts(1), TeacherRoutes((route("t", replica, prompt="{prompt} {answer}"),)))
    (call,) = replica.calls
    assert call.own_prompts == ((9, 9), (9, 9))
    assert call.prompt_lengths == (3, 3)


def test_a_group_without_rows_needs_no_teacher(queue: Queue) -> None:
    replica = FakeReplica("dead")
    write(queue, make_prompts(1), TeacherRoutes((route("t", replica),)), trajectories=0)
    assert replica.calls == []
    assert markers(queue)["p0"]["status"] == "failed"


VALIDATION: dict[str, Any] = {"keep_tensors": False, "partition": "val", "greedy": True, "group_size": 1}


def test_validation_estimates_the_reverse_kl_on_sampled_answers(queue: Queue) -> None:
    write(queue, make_prompts(2), TeacherRoutes((route("t", FakeReplica()),)), **VALIDATION)
    tags = [tags for tags in queue.list("val").tags if "uid" in tags]
    assert [("teacher_kl" in each) for each in tags if each["session"] == 1] == [False, False]
    # the student's log-probabilities are -0.5, the teacher's -2
    assert reverse_kl(tags) == {
        "val-core/distillation/reverse_kl/mean": 1.5,
        "val-aux/distillation/reverse_kl/t": 1.5,
    }


def test_at_another_temperature_the_student_is_scored_at_temperature_1(queue: Queue) -> None:
    async def student(tokens: list[list[int]], starts: list[int]) -> list[np.ndarray]:
        return [np.full(2, -1.0, np.float32) for _ in tokens]

    routes = TeacherRoutes((route("t", FakeReplica()),))
    write(queue, make_prompts(1), routes, student=student, sampling=Sampling(temperature=0.5), **VALIDATION)
    assert reverse_kl(queue.list("val").tags)["val-core/distillation/reverse_kl/mean"] == 1.0


def test_a_validation_goes_on_without_a_teacher_whose_groups_may_be_dropped(queue: Queue) -> None:
    routes = TeacherRoutes((route("t", FakeReplica("dead")),), drops_groups=True)
    write(queue, make_prompts(1), routes, **VALIDATION)
    assert reverse_kl(queue.list("val").tags) == {}
