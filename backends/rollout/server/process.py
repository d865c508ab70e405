"""The processes of one server, which end with this process: start, watch, log, end. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqppo.processes.lifeline import guard_command

GUARD_S = 10.0  # for a guard that has nothing left to do, or was killed, to be gone
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONSTARTUP", "VIRTUAL_ENV")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is not in use, outside the range that the kernel gives to outgoing connections."""
    choice = random.SystemRandom()
    for _ in range(200):
        port = choice.randrange(20_000, 32_000)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between 20000 and 32000 on {host}")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without the variables of its own interpreter and of Ray."""
    kept = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED and not k.startswith("RAY_")}
    return kept | dict(extra)


class ServerProcess:
    """One started server under a guard (`processes.lifeline`). `exited` has the exit code when no process is left."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: str | Path = "", *, grace_s: float = 5.0
    ) -> None:
        self.grace_s = grace_s
        self.scratch = tempfile.mkdtemp(prefix="tqppo-", dir="/tmp")  # short: sockets live in it
        self.log_path = Path(log_path or Path(self.scratch) / "server.log").resolve()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._output, self._final_tail = b"", ""
        log = self.log_path.open("ab", buffering=0)
        log.write(f"$ {' '.join(command)}\n".encode())
        self._log_start = log.tell()
        self._log = self.log_path.open("rb")  # stays readable after the file is removed
        self._popen = subprocess.Popen(
            guard_command(command, remove=[self.scratch], grace_s=grace_s, log=str(self.log_path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=clean_environment({**environment, "TMPDIR": self.scratch}),
            cwd=self.scratch,
            start_new_session=True,
        )
        log.close()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._stdout.fileno(), self._read_output)

    @property
    def pid(self) -> int:
        """The pid of the guard, which leads the process group."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return not self.exited.done()

    @property
    def _stdout(self) -> io.BufferedReader:
        assert isinstance(self._popen.stdout, io.BufferedReader)
        return self._popen.stdout

    def _read_output(self) -> None:
        """Collect the guard's output, which is the exit code; its end means that everything has ended."""
        output = os.read(self._stdout.fileno(), 4096)
        self._output += output
        if output:
            return
        self._loop.remove_reader(self._stdout.fileno())
        try:
            self._popen.wait(GUARD_S)  # it has closed its output, the last thing that it does
        except subprocess.TimeoutExpired:
            self._popen.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # some are left if the guard was killed
            os.killpg(self.pid, signal.SIGKILL)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.exited.set_result(int(self._output) if self._output.strip() else -signal.SIGKILL)

    def tail(self, lines: int = 25) -> str:
        """The last lines of the server's log since its start."""
        if self._log.closed:
            return self._final_tail
        end = self._log.seek(0, io.SEEK_END)
        self._log.seek(max(self._log_start, end - 16_384))
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-lines:])

    async def close(self) -> None:
        """End every process of the server; does nothing if they have ended already."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), self.grace_s + 10)
        except asyncio.TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.TimeoutError):  # a process in the kernel ends when its call returns
                await asyncio.wait_for(asyncio.shield(self.exited), GUARD_S)
        self._stdout.close()
        self._final_tail = self.tail()
        self._log.close()
