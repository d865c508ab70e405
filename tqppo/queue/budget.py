"""Bytes per node, and who waits for some: puts over budget are granted first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tqppo.errors import QueueError
from tqppo.protocols import Locator
from tqppo.queue.calls import Waiting


@dataclass(slots=True)
class _Account:
    used: int = 0
    waiting: deque[tuple[int, Callable[[], Any], Future[Any]]] = field(default_factory=deque)


class Budget:
    """Guarded by the index's lock; only the ends of a wait take it themselves."""

    def __init__(self, limit: int, lock: threading.RLock) -> None:
        self.limit = limit
        self._lock = lock
        self._accounts: dict[str, _Account] = {}

    def ask(self, node: str, num_bytes: int, *, grant: Callable[[], Any], holders: Callable[[], str]) -> Waiting:
        """Call `grant` once these bytes fit, count them, and answer with what it returns."""
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
                return (
                    f"a put of {num_bytes:,} bytes waits: {account.used:,} of {self.limit:,} bytes of node {node} "
                    f"are in use. Held by {holders()}"
                )

        def drop() -> bool:
            with self._lock:
                if entry not in account.waiting:
                    return False
                account.waiting.remove(entry)
                self._grant(account)  # a smaller one behind may fit
                return True

        return Waiting(future, explain, drop)

    def _grant(self, account: _Account) -> None:
        while account.waiting and account.used + account.waiting[0][0] <= self.limit:
            num_bytes, grant, future = account.waiting.popleft()
            account.used += num_bytes
            future.set_result(grant())

    def add(self, locator: Locator) -> None:
        """Count bytes without asking: of a copy that is about to replace something larger."""
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
