"""Calls to teachers: who is asked, how often, until when; and what is said when all fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from rollout.teachers.replicas import FakeReplica, route

from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, DataLost, EngineError
from tqppo.queue.meta import BatchMeta
from tqppo.rollout.teachers import client as client_module
from tqppo.rollout.teachers.client import TeacherClient, TeacherReplicas, TeacherRoute, TeacherRoutes
from tqppo.rollout.teachers.worker import RowsToScore

ROWS = RowsToScore(BatchMeta("train", ("a", "b")), (1, 1))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAUSE_S", 0.0)


def prompt(source: str = "sort", **extra: Any) -> Prompt:
    return Prompt("p0", 0, [1], "", source, extra, "")


def score(*routes: TeacherRoute, turns: int = 1) -> TeacherClient:
    async def run() -> TeacherClient:
        client = TeacherClient(TeacherRoutes(routes))
        for turn in range(turns):
            await client.score(routes[0], ROWS, turn=turn)
        return client

    return asyncio.run(run())


def test_a_row_goes_to_the_teacher_that_matches_its_source_or_column() -> None:
    math, code = route("math", FakeReplica(), match=("gsm8k", "sort")), route("code", FakeReplica(), match=("7",))
    assert TeacherRoutes((math, code)).of(prompt("sort")) is math
    assert TeacherRoutes((math, code)).of(prompt("other")) is None
    assert TeacherRoutes((math, code), column="level").of(prompt("sort", level=7)) is code
    alone = route("all", FakeReplica())
    assert TeacherRoutes((alone,)).of(prompt("anything")) is alone


def test_a_row_without_a_teacher_is_an_error_that_lists_the_teachers() -> None:
    routes = TeacherRoutes((route("math", FakeReplica(), match=("gsm8k",)),), column="subject")
    with pytest.raises(
        DataError, match=r"prompt p0: no teacher scores rows whose subject is 'art'; known: math: gsm8k"
    ):
        routes.required(prompt(subject="art"))


def test_a_call_that_fails_is_repeated_on_the_next_replica_and_counted() -> None:
    first, second = FakeReplica(EngineError("busy")), FakeReplica()
    client = score(route("math", first, second, retries=1))
    assert (len(first.calls), len(second.calls)) == (1, 1)
    figures = client.report.teachers["math"]
    assert (figures.requests, figures.retries, figures.failures, figures.rows) == (1, 1, 0, 2)
    assert (figures.tokens, figures.cached_rows, len(figures.seconds)) == (20, 1, 1)


def test_a_replica_that_was_made_anew_answers_the_repeated_call() -> None:
    replica = FakeReplica("dead", "ok")
    assert score(route("math", replica, retries=1)).report.teachers["math"].retries == 1


def test_after_the_last_attempt_the_error_names_teacher_replica_reason_and_log(tmp_path: Path) -> None:
    log = tmp_path / "teacher-math-0.log"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    with pytest.raises(EngineError) as caught:
        score(route("math", FakeReplica("dead"), retries=2, logs=(str(log),)))
    message = str(caught.value)
    assert message.startswith("teacher math, replica 0: its process died: the actor died")
    assert f"the end of {log}:" in message
    assert "line 99" in message
    assert "line 79" not in message


def test_a_silent_replica_is_an_error_at_the_deadline_and_not_asked_again() -> None:
    silent = FakeReplica("silent")
    taught = route("math", silent, retries=5, timeout_s=0.1)

    async def run() -> list[str]:
        client, messages = TeacherClient(TeacherRoutes((taught,))), []
        for _ in range(2):
            with pytest.raises(EngineError) as caught:
                await client.score(taught, ROWS, turn=0)
            messages.append(str(caught.value))
        assert client.report.teachers["math"].failures == 2
        return messages

    began = time.monotonic()
    messages = asyncio.run(run())
    assert time.monotonic() - began < 3
    assert messages[0] == "teacher math, replica 0: no answer within 0.1 s"
    assert len(silent.calls) == 1


def test_another_replica_takes_over_from_a_silent_one() -> None:
    silent, other = FakeReplica("silent"), FakeReplica()
    score(route("math", silent, other, timeout_s=0.1), turns=3)
    assert (len(silent.calls), len(other.calls)) == (1, 3)


def test_rows_that_are_lost_are_no_failure_of_the_teacher() -> None:
    replica = FakeReplica(DataLost("rows are gone"))
    with pytest.raises(DataLost, match="rows are gone"):
        score(route("math", replica, retries=5))
    assert len(replica.calls) == 1


def test_deterministic_engines_are_asked_in_turn_and_others_where_least_is_going_on() -> None:
    replicas = TeacherReplicas([5, 0, 0])
    assert [replicas.choose(turn, in_turn=True) for turn in range(4)] == [0, 1, 2, 0]
    assert [replicas.choose(turn, in_turn=False) for turn in range(4)] == [1, 1, 2, 1]
    assert TeacherReplicas([0, 0], silent={0, 1}).choose(0, in_turn=True) is None


def test_a_report_is_taken_once() -> None:
    client = score(route("math", FakeReplica()))
    assert client.take_report().teachers["math"].requests == 1
    assert client.take_report().teachers == {}
