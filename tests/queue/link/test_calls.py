"""Coroutines that await replies, driven with and without an event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from tqppo.errors import DeadlineExceeded, QueueError
from tqppo.queue.link.calls import NoAnswer, Pending, clean_up, first_line, run
from tqppo.queue.link.replies import NOT_YET, RemoteReply


class Echo(RemoteReply[str]):
    """Answers after a number of attempts."""

    def __init__(self, attempts: int, timeout_s: float) -> None:
        super().__init__("the echo", timeout_s, [])
        self.attempts, self.is_abandoned = attempts, False

    def _attempt(self, seconds: float) -> Any:
        self.attempts -= 1
        return NOT_YET if self.attempts else "answer"

    async def _answer(self) -> Any:
        await asyncio.sleep(60 if self.attempts > 1 else 0)
        return "answer"

    def _abandon(self) -> None:
        self.is_abandoned = True


async def twice(first: RemoteReply[str], second: RemoteReply[str]) -> list[str]:
    return [await first, await second]


def test_one_coroutine_runs_blocking_and_in_an_event_loop() -> None:
    for drive in (run, asyncio.run):
        assert drive(twice(Echo(1, 5.0), Echo(1, 5.0))) == ["answer", "answer"]


@pytest.mark.parametrize("drive", [run, asyncio.run])
def test_a_call_without_an_answer_is_abandoned_at_its_deadline(drive: Any) -> None:
    reply = Echo(1_000_000_000, 0.05)
    with pytest.raises(NoAnswer, match=r"the echo did not answer within 0\.05 s"):
        drive(twice(reply, Echo(1, 5.0)))
    assert reply.is_abandoned


@pytest.mark.parametrize("drive", [run, asyncio.run])
def test_a_wait_that_ends_at_its_deadline_explains_what_is_missing(drive: Any) -> None:
    future: Future[str] = Future()

    async def wait() -> str:
        return await Pending(future, lambda: "one row is missing", lambda: True).within(0.01)

    with pytest.raises(DeadlineExceeded, match=r"after 0\.01 s: one row is missing"):
        drive(wait())


def test_an_answer_that_comes_at_the_deadline_counts() -> None:
    future: Future[str] = Future()

    def drop() -> bool:
        future.set_result("just in time")
        return False

    assert Pending(future, lambda: "", drop).within(0.0).block() == "just in time"
    assert Pending.done("at once").block() == "at once"


def test_a_failed_clean_up_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise QueueError("the index is gone")

    run(clean_up(fail()))
    assert "the index is gone" in caplog.text


def test_the_first_line_of_an_error_without_text_is_its_class() -> None:
    assert first_line(ValueError("\n  \nfirst\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"
