"""Bytes per node."""

from __future__ import annotations

import threading

import pytest

from tqppo.errors import QueueError
from tqppo.queue.index.budget import Budget
from tqppo.queue.storage import Locator


def test_a_put_that_can_never_fit_is_refused() -> None:
    with pytest.raises(QueueError, match="101 bytes can never fit into the budget of 100 bytes"):
        Budget(100, threading.RLock()).ask("here", 101, grant=lambda: None, holders=lambda: "")


def test_nodes_have_accounts_of_their_own() -> None:
    budget = Budget(100, threading.RLock())
    for node in ("here", "there"):
        assert budget.ask(node, 80, grant=lambda: node, holders=lambda: "").future.result(0) == node  # noqa: B023
    late = budget.ask("here", 30, grant=lambda: "late", holders=lambda: "")
    assert budget.spare("here") == 0, "a put waits"
    assert budget.spare("there") == 20
    budget.give_back([Locator("here", "", 80)])
    assert late.future.result(0) == "late"
    assert budget.stats()["here"] == {"bytes": 30, "budget": 100, "waiting": 0}


def test_reserved_bytes_are_redeemed_once_or_released_by_prefix() -> None:
    budget = Budget(100, threading.RLock())
    for ticket in ("client-1", "client-2", "other-1"):
        budget.reserve("here", 10, ticket, holders=lambda: "")
    assert budget.redeem("client-1")
    assert not budget.redeem("client-1")
    budget.release("client")
    assert budget.stats()["here"]["bytes"] == 20  # a block's, and the other client's
    budget.expire(older_than_s=-1)
    assert budget.stats()["here"]["bytes"] == 10
