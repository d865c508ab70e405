"""Whether the Ray of a run is still there: its control service (GCS) and the raylet of the driver's node.

Ray itself takes a minute to notice that one of them has died, or notices it when something else fails. `watched` looks
at them in a thread; every wait of `ray_calls` calls `check`. A call that does not return, because Ray waits inside of
it, is cut short with the process. Imports no Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqppo.errors import ClusterLost
from tqppo.processes.stillness import LOOK_S, Stillness, activity

log = logging.getLogger(__name__)
POLL_S = 0.5
ANSWER_S = 2.0  # for a connection to a service on another machine
NUM_ATTEMPTS = 3  # of connections, before a service counts as gone
UNWIND_S = 8.0  # from the loss to the end of the process


@dataclass
class LocalService:
    """A process of Ray that this process started."""

    name: str
    pid: int
    _stillness: Stillness = field(default_factory=Stillness)
    _polls: int = 0

    def problem(self) -> str:
        now = activity(self.pid)
        if now is None:
            return f"{self.name} (process {self.pid}) has died"
        self._polls += 1
        if self._polls % round(LOOK_S / POLL_S):
            return ""
        still = self._stillness.look(now)
        return f"{self.name} (process {self.pid}) stands still: {still}" if still else ""


@dataclass
class RemoteService:
    """A process of a cluster that runs already, by its address."""

    name: str
    host: str
    port: int
    _failures: int = 0

    def problem(self) -> str:
        try:
            socket.create_connection((self.host, self.port), timeout=ANSWER_S).close()
            self._failures = 0
            return ""
        except OSError as error:
            self._failures += 1
            is_gone = self._failures >= NUM_ATTEMPTS
            return f"{self.name} at {self.host}:{self.port} does not answer: {error}" if is_gone else ""


RayService = LocalService | RemoteService


class RayHealth:
    """Looks at services until one of them is gone; `lost` then says which."""

    def __init__(
        self, services: list[RayService], on_stuck: Callable[[str], None], on_lost: Callable[[], object]
    ) -> None:
        self.lost = ""
        self._services, self._on_stuck, self._on_lost = services, on_stuck, on_lost
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ray-health")
        self._thread.start()

    def look(self) -> str:
        """Look now; returns what is lost, or nothing."""
        with self._lock:
            for service in self._services:
                if not self.lost and (problem := service.problem()):
                    self.lost = (
                        f"Ray is lost: {problem}. The run cannot go on without it; its last checkpoint is unharmed. "
                        "The logs of Ray are in the run's folder"
                    )
        return self.lost

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            if self.look():
                break
        if self.lost:
            self._on_lost()
            if not self._over.wait(UNWIND_S):
                self._on_stuck(self.lost)


_current: list[RayHealth] = []  # of this process, which has at most one Ray


@contextmanager
def watched(
    services: list[RayService], on_stuck: Callable[[str], None], *, on_lost: Callable[[], object] = lambda: None
) -> Iterator[RayHealth]:
    """Watch these services meanwhile. At a loss `on_lost` is called, in a thread; errors from then on are ClusterLost.

    `on_stuck` gets the message if this is not left soon after the loss.
    """
    health = RayHealth(services, on_stuck, on_lost)
    _current[:] = [health]  # a lost one stays the current one until the next starts: all that is left of it must end
    try:
        yield health
    except ClusterLost:
        raise
    except Exception as error:
        if message := health.look():  # whatever failed, this is why
            raise ClusterLost(message) from error
        raise
    finally:
        health.close()


def lost() -> str:
    """What is lost of this process's Ray; nothing while all is well."""
    return _current[0].lost if _current else ""


def forget() -> None:
    """Forget a lost Ray, once everything of it is taken down."""
    _current.clear()


def check(*, now: bool = False) -> None:
    """Raise ClusterLost if Ray is gone, as far as is known, or after a look at it `now`."""
    if _current and (message := _current[0].look() if now else _current[0].lost):
        raise ClusterLost(message)


def services_of(names: Mapping[str, str], pids: list[int]) -> list[RayService]:
    """The processes among `pids` whose command has one of these names; `names` maps them to words."""
    found: list[RayService] = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/comm") as file:
                command = file.read().strip()
        except OSError:
            continue
        if command in names:
            found.append(LocalService(names[command], pid))
    return found


def leave(message: str) -> None:
    """End this process at once, with the message: a call into Ray does not return."""
    os.write(2, f"error: {message}\n".encode())
    os._exit(ClusterLost.exit_code)
