"""Bytes per node, and who waits for some: puts over budget are granted first come, first served."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tqppo.errors import QueueError
from tqppo.protocols import Locator
from tqppo.queue.link.calls import Waiting


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
    """Guarded by the index's lock; only the ends of a wait take it themselves."""

    def __init__(self, limit: int, lock: threading.RLock) -> None:
        self.limit = limit
        self._lock = lock
        self._accounts: dict[str, _Account] = {}
        self._reserved: dict[str, _Reserved] = {}  # by ticket

    def ask(
        self, node: str, num_bytes: int, *, grant: Callable[[], Any], holders: Callable[[], str],
        undo: Callable[[Any], None] = lambda answer: None,
    ) -> Waiting:  # fmt: skip
        """Call `grant` once these bytes fit, count them, and answer with what it returns; `undo` is the way back."""
        if num_bytes > self.limit:
            raise QueueError(
                f"a put of {num_bytes:,} bytes can never fit into the budget of {self.limit:,} bytes per node; "
                "put fewer rows at a time, or raise storage.budget_gb"
            )
        account = self._account(node)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # whoever waits for it may give up, but not cancel it
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

        return Waiting(future, explain, drop, undo)

    def _grant(self, account: _Account) -> None:
        """Never from within a grant, which may give bytes back: the loop that is under way goes on with those."""
        if account.is_granting:
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
                    if not isinstance(error, Exception):  # Ctrl-C is not only for whoever waits
                        raise
        finally:
            account.is_granting = False

    def _holders(self, node: str, holders: Callable[[], str]) -> str:
        under_way = sum(each.num_bytes for each in self._reserved.values() if each.node == node)
        return holders() + (f"; {under_way:,} bytes: puts under way" if under_way else "")

    # -- bytes of blocks that are still to be written --------------------------------------------------------------

    def reserve(self, node: str, num_bytes: int, ticket: str, *, holders: Callable[[], str]) -> Waiting:
        """Count these bytes once they fit; the ticket is to be redeemed or released."""

        def grant() -> None:
            self._reserved[ticket] = _Reserved(node, num_bytes, time.monotonic())

        def undo(_: None) -> None:
            with self._lock:
                self.release(ticket)

        return self.ask(node, num_bytes, grant=grant, holders=holders, undo=undo)

    def redeem(self, ticket: str | None) -> bool:
        """The reserved bytes are a block's from now on. False: there are none, or not any more."""
        return ticket is not None and self._reserved.pop(ticket, None) is not None

    def release(self, beginning: str) -> None:
        """Give back what is reserved under tickets that begin like this."""
        for ticket in [ticket for ticket in self._reserved if ticket.startswith(beginning)]:
            reserved = self._reserved.pop(ticket)
            self.give_back([Locator(reserved.node, "", reserved.num_bytes)])

    def expire(self, older_than_s: float) -> None:
        """Release what was reserved long ago, by processes that never came back."""
        old = time.monotonic() - older_than_s
        for ticket in [ticket for ticket, each in self._reserved.items() if each.since < old]:
            self.release(ticket)

    # -- accounts --------------------------------------------------------------------------------------------------

    def add(self, locator: Locator) -> None:
        """Count bytes without asking: of blocks that take the place of others."""
        self._account(locator.node).used += locator.num_bytes

    def give_back(self, locators: Sequence[Locator]) -> None:
        for locator in locators:
            self._account(locator.node).used -= locator.num_bytes
        for node in {locator.node for locator in locators}:
            self._grant(self._account(node))

    def spare(self, node: str) -> int:
        account = self._account(node)
        return 0 if account.waiting else max(0, self.limit - account.used)

    def stats(self) -> dict[str, dict[str, int]]:
        return {
            node: {"bytes": account.used, "budget": self.limit, "waiting": len(account.waiting)}
            for node, account in self._accounts.items()
        }

    def _account(self, node: str) -> _Account:
        return self._accounts.setdefault(node, _Account())
