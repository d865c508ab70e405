"""A process that has imported what every role needs, and from which Ray's workers are forked: none imports it again.

`run.launch` starts it before a private Ray, whose raylet then starts `forked_worker.py` in place of Ray's own script.
That sends the server its command line, environment and standard streams; the server forks, and the child runs Ray's
script as if it had been started so. Where there is no server, or it has died, a worker starts as Ray does it: slower,
and otherwise the same.

The server computes nothing, starts no thread and does not look for GPUs, so that a fork is safe. It does not import
Ray, which keeps the environment of the moment when it is imported. When its owner dies, however that happens, the
kernel closes the pipe that is the server's standard input: then it ends all workers, and itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from tqppo.processes.forked_worker import ANSWER, MAX_REQUEST, SERVER
from tqppo.processes.garbage import spare_what_started, spared_while_importing
from tqppo.processes.lifeline import end_children

# Without the folder that the user is in: a module there would hide one of the same name.
START = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"
BACKLOG = 128
CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


@contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[None]:
    """Start a server that imports `modules`; workers of a Ray that this process starts within this context find it.

    If this process has one already, workers find that.
    """
    if has_server():
        yield
        return
    before = os.environ.get(SERVER)  # of a process above this one, which would outlive it
    address = f"{_prefix()}{secrets.token_hex(4)}"
    threads = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")
    }  # as Ray sets it, but torch reads it only once
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(BACKLOG)  # who asks while the server imports waits
        server = subprocess.Popen(
            [sys.executable, "-c", START, str(listener.fileno()), *modules],
            env={**os.environ, **threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what imports say, the driver's own say as well
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    with server:
        os.environ[SERVER] = address
        try:
            yield
        finally:
            os.environ.pop(SERVER) if before is None else os.environ.update({SERVER: before})
            server.kill()  # the workers ended with Ray


def has_server() -> bool:
    """Whether this process has started a server, which runs."""
    return os.environ.get(SERVER, "").startswith(_prefix())


def _prefix() -> str:
    return f"tqppo-fork-{os.getpid()}-"


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What makes a process the one that Ray wanted to start: see `forked_worker.py`, which sends it."""

    script: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    blocked_signals: Sequence[int]
    open_files: int
    niceness: int
    streams: Sequence[int]

    @staticmethod
    def read(connection: socket.socket) -> WorkerRequest:
        data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
        while not data.endswith(b"\n"):
            more = connection.recv(MAX_REQUEST)
            if not more:
                raise ConnectionError("the worker ended before it had said what it is")
            data += more
        return WorkerRequest(**json.loads(data), streams=streams)

    def become(self) -> None:
        """Make this process look as if it had been started with this command line, environment and streams."""
        for place, stream in enumerate(self.streams):
            os.dup2(stream, place)
            os.close(stream)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        os.setpgid(0, 0)  # as a raylet has it
        os.nice(self.niceness - os.nice(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)
        np.random.seed()  # Python's own random numbers differ after a fork, numpy's do not
        sys.argv = [self.script, *self.arguments]
        sys.path.insert(0, os.path.dirname(self.script))


def serve(server: socket.socket) -> WorkerRequest | None:
    """Fork a process for every request; returns the request in the child, and None when the owner is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end are no zombies
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_children()
            return None
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            if not _is_own(connection):
                continue
            request = WorkerRequest.read(connection)
            is_awaited = not _has_hung_up(connection)
            if is_awaited and os.fork() == 0:
                return request
            for stream in request.streams:
                os.close(stream)
            if is_awaited:
                connection.sendall(ANSWER)


def _is_own(connection: socket.socket) -> bool:
    """Whether a process of this user asks."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(found)
    return bool(user == os.getuid())


def _has_hung_up(connection: socket.socket) -> bool:
    """Whether the asking process has ended or given up: its worker has started otherwise."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def main() -> None:
    listener, *modules = sys.argv[1:]
    with socket.socket(fileno=int(listener)) as server:
        with spared_while_importing():
            for name in modules:
                import_module(name)
        if "ray" in sys.modules or threading.active_count() > 1:  # by a back end: then Ray starts its workers itself
            return
        spare_what_started()  # a collection would write into pages that the children share
        request = serve(server)
    if request is not None:
        request.become()
        runpy.run_path(request.script, run_name="__main__")


if __name__ == "__main__":
    main()
