"""The life of a server: started or attached to, watched, restarted when it dies, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tqppo.engines import environments
from tqppo.errors import BackendError, EngineError, TqppoError
from tqppo.protocols import Incident

from .api import ServerApi
from .http import EngineServer, ServerDied
from .process import ServerProcess, free_port

log = logging.getLogger(__name__)
T = TypeVar("T")
TOKEN_VARIABLE = "TQPPO_ROLLOUT_TOKEN"  # bearer token of servers to attach to
MAX_CONNECTIONS = 512  # file descriptors are finite; more requests wait their turn
NUM_PORTS = 3  # attempts, when another process takes the port before the server does
GPU_GRACE_S = 15.0  # a server needs this long to free a GPU's memory
REPORT_S = 15.0  # between log lines while a server starts


class ServerLifecycle:
    """At most one server at a time. `prepare` loads the current weights into a server before it is handed out."""

    def __init__(self, api: ServerApi, prepare: Callable[[EngineServer], Awaitable[None]]) -> None:
        self._api, self._prepare, self._spec = api, prepare, api.spec
        self._current: asyncio.Task[EngineServer] | None = None
        self._dead: EngineServer | None = None  # the one before the current server
        self._restarts = 0
        self._incidents: list[Incident] = []

    @property
    def process(self) -> ServerProcess | None:
        """The process of the server that runs now, if it is one of ours."""
        current = self._current
        if current is None or not current.done() or current.cancelled() or current.exception() is not None:
            return None
        process = current.result().process
        return process if process is not None and process.is_alive else None

    async def start(self) -> None:
        self._current = asyncio.ensure_future(self._attach() if self._spec.endpoint else self._boot())
        await self.live()

    async def live(self) -> EngineServer:
        """The server that runs now; waits while one is being started."""
        while True:
            if self._current is None:
                raise EngineError(f"{self._spec.name} is not running")
            server = await asyncio.shield(self._current)
            if server.is_alive:
                return server
            self._replace(server)

    async def call(self, request: Callable[[EngineServer], Awaitable[T]]) -> T:
        """The answer to a request, which is repeated once if its server dies."""
        try:
            return await request(await self.live())
        except ServerDied as death:
            log.debug("a request is repeated because its server died: %s", death)
        return await request(await self.live())

    def take_incidents(self) -> list[Incident]:
        taken, self._incidents = self._incidents, []
        return taken

    async def close(self) -> bool:
        """End the server; false if there was none."""
        current, self._current = self._current, None
        if current is None:
            return False
        current.cancel()
        with contextlib.suppress(asyncio.CancelledError, TqppoError):
            await (await current).close()
        if self._dead is not None:
            await self._dead.close()  # the task that replaces it may have been cancelled before it did so
        return True

    def _replace(self, dead: EngineServer) -> None:
        """Start the next server, unless that was done already."""
        current = self._current
        if current is None or not current.done() or current.cancelled() or current.exception() is not None:
            return
        if current.result() is dead:
            self._dead = dead
            self._current = asyncio.ensure_future(self._boot_again(dead))
            # Marks the exception as retrieved, since there may be no request that awaits the task.
            self._current.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _boot_again(self, dead: EngineServer) -> EngineServer:
        reason: EngineError = dead.death()
        await dead.close()
        while self._restarts < self._spec.max_restarts:
            self._restarts += 1
            which = f"restart {self._restarts} of {self._spec.max_restarts}"
            log.warning("%s: %s: %s", self._spec.name, which, reason)
            self._incidents.append(Incident(self._spec.name, f"{which}: {reason}"))
            try:
                return await self._boot()
            except ServerDied as error:
                reason = error
        raise EngineError(f"rollout.max_restarts = {self._spec.max_restarts} is used up: {reason}")

    async def _boot(self) -> EngineServer:
        """A healthy server with the current weights; if that fails, no process is left."""
        python = environments.python_of(self._api.backend, self._spec.python, on_gpu=self._api.on_gpu)
        for attempt in itertools.count(1):
            server, process = self._launch(python, free_port(self._spec.host))
            try:
                await self._wait_until_healthy(server, process)
                await self._api.inspect(server)
                await self._prepare(server)
            except BaseException as error:
                await server.close()
                if isinstance(error, ServerDied) and "address already in use" in str(error) and attempt < NUM_PORTS:
                    continue
                raise
            self._replace_at_exit(server, process)
            return server
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _replace_at_exit(self, server: EngineServer, process: ServerProcess) -> None:
        process.exited.add_done_callback(lambda _: self._replace(server))

    def _launch(self, python: str, port: int) -> tuple[EngineServer, ServerProcess]:
        api, spec = self._api, self._spec
        log_path = Path(spec.log_dir) / f"{spec.name}.log" if spec.log_dir else ""
        grace_s = max(api.grace_s, GPU_GRACE_S) if api.on_gpu else api.grace_s
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or spec.interface}
        command = [*api.command(python, port), *api.flags()]
        # Ray lets this process see its first GPU only.
        visible = {} if spec.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(spec.devices)}
        environment = interface | visible | api.environment()
        process = ServerProcess(command, environment, log_path, grace_s=grace_s)
        log.info("%s: starting %s on port %d (log: %s)", spec.name, api.backend, port, process.log_path)
        return self._connect(f"http://{_reachable(spec.host)}:{port}", process, api.token), process

    def _connect(self, url: str, process: ServerProcess | None, token: str) -> EngineServer:
        connections = min(self._spec.max_running, MAX_CONNECTIONS) + 16
        return EngineServer(
            self._spec.name, url, process=process, token=token, num_connections=connections, dying_s=self._api.dying_s
        )

    async def _wait_until_healthy(self, server: EngineServer, process: ServerProcess) -> None:
        started = reported = time.monotonic()
        while not await server.is_healthy():
            await asyncio.wait({process.exited}, timeout=0.25)
            if not server.is_alive:
                raise server.death()
            now = time.monotonic()
            if now - started > self._spec.start_timeout_s:
                name, log_tail = self._spec.name, process.tail()
                raise EngineError(f"{name} was not healthy after {now - started:.0f} s; its log:\n{log_tail}")
            if now - reported > REPORT_S:
                reported = now
                log.info("%s: %.0f s: %s", self._spec.name, now - started, process.tail(1)[:120])
        log.info("%s: healthy after %.1f s", self._spec.name, time.monotonic() - started)

    async def _attach(self) -> EngineServer:
        server = self._connect(self._spec.endpoint.rstrip("/"), None, os.environ.get(TOKEN_VARIABLE, ""))
        try:
            if not await server.is_healthy():
                raise BackendError(f"no healthy {self._api.backend} server answers at {self._spec.endpoint}")
            await self._api.inspect(server)
        except BaseException:
            await server.close()
            raise
        return server


def _reachable(host: str) -> str:
    """The address at which a server that binds to `host` is called from this machine."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
