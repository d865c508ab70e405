"""One process at a time works on a run: a lock on its folder, on shared file systems too. No torch.

`flock` is the proof among the processes of one machine, containers included: the kernel releases it when the process
ends, however it ends. Between machines it is not trusted, because network file systems do not always carry it. There
the lease decides: the lock file says who holds it, the holder renews the file's time stamp, and a holder on another
machine counts as alive while the stamp is fresh. The same holds on file systems that refuse `flock`.

A holder that was stopped for longer than its lease, or whose lock file was deleted, may have lost the run to another
process. It calls `check` before it writes, and stops there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqppo import space
from tqppo.errors import LockLost, PreflightError
from tqppo.untrusted import parse_json

LOCK = ".lock"  # the lock file in a run's folder
RENEW_S = 10.0
EXPIRES_S = 60.0  # a holder on another machine that has not renewed its lease for this long is dead
SETTLE_S = 0.2  # between writing a lease and reading it back, so that one of two machines that write at once sees it
JOIN_S = 5.0  # for the thread that renews the lease; it may wait for the file system
LOOK_S = 0.05  # longer than `is_held` has a lock file locked
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_machine() -> str:
    """Names the running kernel, which containers on it share: host names may repeat, or differ within one machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lock. `token` is new each time that it is taken."""

    pid: int
    host: str
    since: str
    command: str
    machine: str
    token: str

    @staticmethod
    def this_process() -> Holder:
        since, command = time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(sys.argv)[:200]
        return Holder(os.getpid(), socket.gethostname(), since, command, this_machine(), secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} (`{self.command}`)"


class RunLock:
    """Held while a process writes into a run's folder. Raises `PreflightError` if another process holds it."""

    def __init__(
        self,
        folder: Path,
        *,
        renew_s: float = RENEW_S,
        expires_s: float = EXPIRES_S,
        settle_s: float = SETTLE_S,
        flock: Callable[[int, int], None] = fcntl.flock,
    ) -> None:
        self.path = folder / LOCK
        self._renew_s, self._expires_s, self._settle_s, self._flock = renew_s, expires_s, settle_s, flock
        self._descriptor, self._token = -1, ""
        self._released, self._checking = threading.Event(), threading.RLock()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self._descriptor = self._taken()
        self._released.clear()
        self._renewing = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._renewing.start()
        _held.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        if self._renewing is not None:
            self._renewing.join(JOIN_S)
        _held.discard(self)
        if self._descriptor < 0:
            return  # a forked child, which does not hold the lock
        with suppress(LockLost, OSError):
            self.check()
            os.ftruncate(self._descriptor, 0)  # free; the file stays, so that two processes lock the same one
        os.close(self._descriptor)
        self._descriptor = -1

    def check(self) -> None:
        """Raise `LockLost` if another process has taken the run over."""
        with self._checking:
            try:
                holder, is_same_file = self._written(self._descriptor)
            except FileNotFoundError:  # deleted by hand
                self._take_again()
                return
            except OSError:  # the file system does not answer; the write that follows says why
                return
        if not is_same_file or holder is None or holder.token != self._token:
            raise LockLost(
                f"{self.path.parent} was taken over by {holder or 'another process'} while this process was stopped or "
                "could not reach the file system; this process ends without writing to it"
            )

    def leave_to_parent(self) -> None:
        """In a forked child: close the inherited descriptor, so that a child that outlives the owner holds nothing."""
        os.close(self._descriptor)
        self._descriptor = -1

    def _taken(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in space.FULL:
                raise space.out_of_space(self.path.parent, 0, error) from error
            raise PreflightError(
                f"{self.path} cannot be opened for writing: {error.strerror}. To continue a run, its folder must be "
                "writable: copy it to a place where you may write"
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PreflightError(f"{self.path} is not a regular file; remove it")
            with space.explained(self.path.parent, 0):
                self._take(descriptor)
        except FileNotFoundError:
            os.close(descriptor)
            raise PreflightError(f"another process has just deleted {self.path.parent}") from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _take(self, descriptor: int) -> None:
        is_proof = self._flocked(descriptor)
        previous = _holder(descriptor)
        if (
            previous is not None
            and not (is_proof and previous.machine == this_machine())
            and self._is_fresh(descriptor)
        ):
            raise self._refusal(previous)
        holder = self._sign(descriptor)
        time.sleep(self._settle_s)
        now, is_same_file = self._written(descriptor)
        if not is_same_file or now != holder:
            raise self._refusal(now)
        self._token = holder.token

    def _flocked(self, descriptor: int) -> bool:
        """Take the flock. False on a file system that has none: there the lease alone decides.

        A second try follows a first one in vain: `is_held` has the file locked for a moment.
        """
        try:
            self._flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:
            return False
        try:
            self._flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise self._refusal(_holder(descriptor)) from None

    def _sign(self, descriptor: int) -> Holder:
        """Write into the lock file that this process holds it."""
        holder = Holder.this_process()
        text = json.dumps(asdict(holder)).encode()
        with space.explained(self.path.parent, len(text)):
            os.ftruncate(descriptor, 0)
            if os.pwrite(descriptor, text, 0) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        return holder

    def _take_again(self) -> None:
        """Take the lock in a new file, after the file was deleted."""
        try:
            descriptor = self._taken()
        except PreflightError as error:
            raise LockLost(str(error)) from None
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)

    def _written(self, ours: int) -> tuple[Holder | None, bool]:
        """The holder by the lock file that has the name now, and whether that is the open file `ours`.

        Opens the file again: a network file system shows other machines' writes only to files opened after them.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _holder(descriptor), os.path.samestat(os.fstat(descriptor), os.fstat(ours))
        finally:
            os.close(descriptor)

    def _is_fresh(self, descriptor: int) -> bool:
        """Whether the lease was renewed lately, by the file system's own clock: machines' clocks may differ."""
        probe = self.path.with_name(f".lock-clock-{secrets.token_hex(4)}")
        try:
            probe.touch()
            now = probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
        return abs(now - os.fstat(descriptor).st_mtime) < self._expires_s  # the file system's clock may be set back

    def _refusal(self, holder: Holder | None) -> PreflightError:
        elsewhere = ""
        if holder is not None and holder.machine != this_machine():
            elsewhere = f". If that machine is gone, its lease ends {self._expires_s:g} s after its last sign of life"
        return PreflightError(
            f"{self.path.parent} is in use by {holder or 'another process'}. Two processes must not work on one run: "
            "wait until it has ended, stop it (Ctrl-C or SIGTERM saves a checkpoint), or train under another name"
            f"{elsewhere}"
        )

    def _renew(self) -> None:
        """Renew the lease. After an error of the file system the next try is as good as any; `check` has the say."""
        while not self._released.wait(self._renew_s):
            with suppress(OSError, LockLost):
                self.check()
                os.utime(self._descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process works on the run, as far as can be told without touching its lock file."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        holder, is_proof = _holder(descriptor), True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            is_proof = False
        if holder is None or (is_proof and holder.machine == this_machine()):
            return False
        return abs(time.time() - os.fstat(descriptor).st_mtime) < EXPIRES_S
    finally:
        os.close(descriptor)


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _leave_in_child() -> None:
    for lock in list(_held):
        lock.leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def _holder(descriptor: int) -> Holder | None:
    try:
        read: Any = parse_json(os.pread(descriptor, 4096, 0))
        texts = (str(read[name]) for name in ("host", "since", "command", "machine", "token"))
        return Holder(int(read["pid"]), *texts)
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return None
