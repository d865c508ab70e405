"""The script that a raylet starts for a worker: asks the run's fork server for the worker's process, and ends.

Run by path, with the arguments of Ray's own `default_worker.py`. Standard library only. Without a server it becomes
that script.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys

SERVER = "TQPPO_FORK_SERVER"  # the variable with the server's address
ANSWER = b"forked"
MAX_REQUEST = 2**20
ANSWER_TIMEOUT_S = 40.0  # a server imports for seconds on a busy machine; a raylet waits a minute for its worker


def ray_script() -> str:
    """The path of Ray's script, without importing Ray."""
    from importlib.util import find_spec

    spec = find_spec("ray")
    assert spec, "a raylet has started this"
    return os.path.join(os.path.dirname(spec.origin or ""), "_private", "workers", "default_worker.py")


def ask(address: str, script: str, arguments: list[str]) -> bool:
    """Have the server fork this worker; False if it does not."""
    request = {
        "script": script,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked_signals": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "niceness": os.nice(0),
    }
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(ANSWER_TIMEOUT_S)
            server.connect(f"\0{address}")
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(server, [data], [0, 1, 2])
            if sent < len(data):  # else the server may have answered and hung up
                server.sendall(data[sent:])
            return server.recv(len(ANSWER)) == ANSWER
    except OSError:
        return False


def main() -> None:
    script = ray_script()
    if not ask(os.environ.get(SERVER, ""), script, sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])


if __name__ == "__main__":
    main()
