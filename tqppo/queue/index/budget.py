"""Bytes in use per node, and the puts that wait for some: granted first come, first served."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tqppo.errors import QueueError
from tqppo.queue.index.answers import NodeStats
from tqppo.queue.link.calls import Pending
from tqppo.queue.storage import Locator

T = TypeVar("T")


@dataclass(slots=True)
class _Account:
    used: int = 0
    waiting: deque[tuple[int, Callable[[], Any], Future[Any]]] = field(default_factory=deque)
    is_granting: bool = False


class _Reserved(NamedTuple):
    node: str
    num_bytes: int
    since: float


class Budget:
    """Callers must hold the index lock. The `explain`, `drop` and `undo` callbacks of a `Pending` run outside it and
    take it themselves."""

    def __init__(self, limit: int, lock: threading.RLock) -> None:
        self.limit = limit
        self._lock = lock
        self._accounts: dict[str, _Account] = {}
        self._reserved: dict[str, _Reserved] = {}  # by ticket

    def ask(
        self, node: str, num_bytes: int, *, grant: Callable[[], T], holders: Callable[[], str],
        undo: Callable[[T], None] = lambda answer: None,
    ) -> Pending[T]:  # fmt: skip
        """Count these bytes once they fit, call `grant` and answer with its result. `undo` takes a grant back."""
        if num_bytes > self.limit:
            raise QueueError(
                f"a put of {num_bytes:,} bytes can never fit into the budget of {self.limit:,} bytes per node; "
                "put fewer rows at a time, or raise storage.budget_gb"
            )
        account = self._account(node)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it
        entry = (num_bytes, grant, future)
        account.waiting.append(entry)
        self._grant(account)

        def explain() -> str:
            with self._lock:
                before = account.waiting.index(entry) if entry in account.waiting else 0
                return (
                    f"a put of {num_bytes:,} bytes waits: {account.used:,} of {self.limit:,} bytes of node {node} "
                    f"are in use{f', {before} other puts are before it' if before else ''}. "
                    f"Held by {self._holders(node, holders)}"
                )

        def drop() -> bool:
            with self._lock:
                if entry not in account.waiting:
                    return False
                account.waiting.remove(entry)
                self._grant(account)  # a smaller one behind may fit
                return True

        return Pending(future, explain, drop, undo)

    def _grant(self, account: _Account) -> None:
        """Grant waiting puts in order, as far as they fit."""
        if account.is_granting:  # a grant may give bytes back; the loop that called it continues with those
            return
        account.is_granting = True
        try:
            while account.waiting and account.used + account.waiting[0][0] <= self.limit:
                num_bytes, grant, future = account.waiting.popleft()
                account.used += num_bytes
                try:
                    future.set_result(grant())
                except BaseException as error:
                    account.used -= num_bytes
                    future.set_exception(error)
                    if not isinstance(error, Exception):  # Ctrl-C concerns this thread, not only the waiting call
                        raise
        finally:
            account.is_granting = False

    def _holders(self, node: str, holders: Callable[[], str]) -> str:
        under_way = sum(each.num_bytes for each in self._reserved.values() if each.node == node)
        return holders() + (f"; {under_way:,} bytes: puts under way" if under_way else "")

    # -- bytes of blocks that are still to be written --------------------------------------------------------------

    def reserve(self, node: str, num_bytes: int, ticket: str, *, holders: Callable[[], str]) -> Pending[None]:
        """Count these bytes once they fit, until the ticket is redeemed or released."""

        def grant() -> None:
            self._reserved[ticket] = _Reserved(node, num_bytes, time.monotonic())

        def undo(_: None) -> None:
            with self._lock:
                self.release(ticket)

        return self.ask(node, num_bytes, grant=grant, holders=holders, undo=undo)

    def redeem(self, ticket: str | None) -> bool:
        """Turn reserved bytes into those of a block. False if the ticket reserves none, or no longer does."""
        return ticket is not None and self._reserved.pop(ticket, None) is not None

    def release(self, prefix: str) -> None:
        """Give back the bytes reserved under tickets with this prefix."""
        for ticket in [ticket for ticket in self._reserved if ticket.startswith(prefix)]:
            reserved = self._reserved.pop(ticket)
            self.give_back([Locator(reserved.node, "", reserved.num_bytes)])

    def expire(self, older_than_s: float) -> None:
        """Release what was reserved long ago, by processes that must have died since."""
        old = time.monotonic() - older_than_s
        for ticket in [ticket for ticket, each in self._reserved.items() if each.since < old]:
            self.release(ticket)

    # -- accounts --------------------------------------------------------------------------------------------------

    def add(self, locator: Locator) -> None:
        """Count the bytes of a block that takes the place of another, whether or not they fit."""
        self._account(locator.node).used += locator.num_bytes

    def give_back(self, locators: Sequence[Locator]) -> None:
        for locator in locators:
            self._account(locator.node).used -= locator.num_bytes
        for node in {locator.node for locator in locators}:
            self._grant(self._account(node))

    def spare(self, node: str) -> int:
        account = self._account(node)
        return 0 if account.waiting else max(0, self.limit - account.used)

    def stats(self) -> dict[str, NodeStats]:
        return {
            node: {"bytes": account.used, "budget": self.limit, "waiting": len(account.waiting)}
            for node, account in self._accounts.items()
        }

    def _account(self, node: str) -> _Account:
        return self._accounts.setdefault(node, _Account())
