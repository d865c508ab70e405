"""One process at a time works on a run: a lock on its folder, on shared file systems too. No torch.

The lock file names its holder, and `flock` is the proof on one machine: the kernel releases it when the process ends,
however it ends. Network file systems do not always carry `flock` from one machine to another, so the holder also renews
the file's time stamp, and a holder on another machine counts as alive while the stamp is fresh.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tqppo.errors import PreflightError

RENEW_S = 10.0
EXPIRES_S = 60.0  # a holder on another machine that has not renewed its lease for this long is dead


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lock."""

    pid: int
    host: str
    since: str
    command: str

    @staticmethod
    def this_process() -> Holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return Holder(os.getpid(), socket.gethostname(), since, " ".join(sys.argv)[:200])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (`{self.command}`)"


class RunLock:
    """Held while a process writes into a run's folder. Raises `PreflightError` if another process holds it."""

    def __init__(self, folder: Path, *, renew_s: float = RENEW_S, expires_s: float = EXPIRES_S) -> None:
        self.path = folder / ".lock"
        self._renew_s, self._expires_s = renew_s, expires_s
        self._descriptor = -1
        self._released = threading.Event()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._released.clear()
        self._renewing = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        if self._renewing is not None:
            self._renewing.join()
        os.ftruncate(self._descriptor, 0)  # free; the file stays, so that two processes lock the same one
        os.close(self._descriptor)
        self._descriptor = -1

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(_holder(descriptor)) from None
        except OSError:
            pass  # a file system without flock: the lease alone decides
        previous = _holder(descriptor)
        if previous is not None and previous.host != socket.gethostname() and self._is_fresh(descriptor):
            raise self._refusal(previous)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Holder.this_process())).encode(), 0)
        os.fsync(descriptor)

    def _is_fresh(self, descriptor: int) -> bool:
        """Whether the lease was renewed lately, by the file system's own clock: machines' clocks may differ."""
        probe = self.path.with_name(f".lock-clock-{secrets.token_hex(4)}")
        try:
            probe.touch()
            now = probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
        return now - os.fstat(descriptor).st_mtime < self._expires_s

    def _refusal(self, holder: Holder | None) -> PreflightError:
        return PreflightError(
            f"{self.path.parent} is in use by {holder or 'another process'}. Two processes must not work on one run: "
            "wait until it has ended, stop it (Ctrl-C or SIGTERM saves a checkpoint), or train under another name"
        )

    def _renew(self) -> None:
        while not self._released.wait(self._renew_s):
            os.utime(self._descriptor)


def _holder(descriptor: int) -> Holder | None:
    try:
        fields = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(int(fields["pid"]), str(fields["host"]), str(fields["since"]), str(fields["command"]))
    except (ValueError, KeyError, TypeError):
        return None
