"""What the engines that run as servers share: start, watch, restart, feed with weights, stop.

A subclass says how its server is started and spoken to; everything about life and death is here. A request
that dies with its server is asked once more of the next one, with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import ipaddress
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tqppo.engines import environments as engines
from tqppo.engines.capabilities import argument_name, instead_of
from tqppo.errors import BackendError, EngineError, PreflightError, TqppoError
from tqppo.protocols import (
    Bucket,
    Completion,
    EngineCapabilities,
    EngineSpec,
    Request,
    Scores,
    WeightSender,
    WeightSource,
)

from .gate import Gate
from .group import Group, Meeting, together
from .http import Server, ServerDied
from .process import ServerProcess, free_port

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
TOKEN_VARIABLE = "TQPPO_ROLLOUT_TOKEN"  # bearer token of servers that already run
CONTROL_TIMEOUT_S = 120.0  # of one step of a weight update
MAX_CONNECTIONS = 512  # file descriptors are finite; more requests wait their turn
BUCKET_BYTES = 256 * 1024**2  # of weights that travel as one piece between nodes
NUM_PORTS = 3  # tries, when somebody takes the port before the server does


def has_gpu() -> bool:
    """Whether a GPU is visible to this process; asks no library, since the trainer's torch may be another build."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible not in ("", "-1") and bool(glob.glob("/dev/nvidia[0-9]*"))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def to_flags(arguments: Mapping[str, Any], *, negatable: bool) -> list[str]:
    """`{"a-b": 1, "c": True}` → `--a-b 1 --c`. False is `--no-c` where the server knows that form, else left out."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags += [f"--no-{name}"] if negatable else []
        elif isinstance(value, Mapping):
            flags += [f"--{name}", json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags


class ServerEngine:
    """A rollout engine behind HTTP. See `protocols.RolloutEngine` for the contract."""

    backend: ClassVar[str]
    capabilities: ClassVar[EngineCapabilities]
    negatable: ClassVar[bool] = False
    grace_s: ClassVar[float] = 5.0  # between SIGTERM and SIGKILL
    bucket_bytes = BUCKET_BYTES

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.model = str(Path(spec.model).resolve()) if Path(spec.model).is_dir() else spec.model  # or a hub name
        self.on_gpu = has_gpu()
        self.token = "" if is_loopback(spec.host) else secrets.token_urlsafe(24)
        self.served_name = f"{spec.name}-{secrets.token_hex(4)}"  # proves that the server that answers is ours
        self.version = 0
        self.label: str | None = None  # what the server calls the weights we pushed
        self._source: WeightSource | None = None
        self._group: Group | None = None
        self._current: asyncio.Task[Server] | None = None
        self._restarts = 0
        self._gate = Gate()
        self._ids = itertools.count()
        self._running: dict[str, set[str]] = {}
        self._user_arguments = self._checked(spec.engine_args)

    # What a subclass says.

    def arguments(self) -> dict[str, Any]:
        """Flags of the server, without model, host and port."""
        raise TypeError(f"{type(self).__name__} does not say how it is started")

    def command(self, python: str, port: int) -> list[str]:
        raise TypeError(f"{type(self).__name__} does not say how it is started")

    def environment(self) -> dict[str, str]:
        return {}

    async def _inspect(self, server: Server) -> None:
        """Raise unless the server is ours, or for one that already ran, of a version and model that we can use."""

    async def _push(self, server: Server, source: WeightSource) -> None:
        """Load them; `_receive` does it where they come from a sender."""
        raise TypeError(f"{type(self).__name__} does not load weights")

    async def _join(self, server: Server, meeting: Meeting) -> None:
        raise TypeError(f"{type(self).__name__} joins no process group")

    async def _take(self, server: Server, group: str, buckets: Sequence[Bucket]) -> None:
        """Receive and load what the group's sender sends."""
        raise TypeError(f"{type(self).__name__} joins no process group")

    async def _generate(self, server: Server, request: Request, request_id: str) -> Completion:
        raise TypeError(f"{type(self).__name__} does not generate")

    async def _score(self, server: Server, tokens: Sequence[int], top_k: int) -> Scores:
        raise TypeError(f"{type(self).__name__} does not score")

    async def _abort(self, server: Server, request_id: str) -> None:
        raise TypeError(f"{type(self).__name__} does not abort")

    # The contract.

    async def start(self) -> None:
        self._current = asyncio.ensure_future(self._attach() if self.spec.endpoint else self._boot())
        await self._server()

    def expect(self, num_requests: int) -> None:
        """Servers batch by themselves."""

    async def generate(self, request: Request) -> Completion:
        self._room(request)
        request_id = f"{request.request_id}.{next(self._ids)}"
        self._running.setdefault(request.request_id, set()).add(request_id)
        try:
            async with self._gate.passing():
                return await self._on_server(lambda server: self._generate(server, request, request_id))
        finally:
            ids = self._running[request.request_id]
            ids.discard(request_id)
            if not ids:
                del self._running[request.request_id]

    def _room(self, request: Request) -> int:
        """How many tokens may follow."""
        room = self.spec.max_context_tokens - len(request.tokens)
        if room < 1:
            raise EngineError(
                f"a prompt of {len(request.tokens)} tokens leaves no room in a context of "
                f"{self.spec.max_context_tokens} (rollout.max_context_tokens)"
            )
        return min(request.sampling.max_new_tokens, room)

    async def abort(self, request_id: str) -> None:
        """Returns when the request has; the server may not know it yet, so it is told until then."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        while (running := tuple(self._running.get(request_id, ()))) and time.monotonic() < deadline:
            for server_id in running:
                await self._abort(await self._server(), server_id)
            await asyncio.sleep(0.02)

    async def score(self, tokens: Sequence[int], top_k: int = 0) -> Scores:
        async with self._gate.passing():
            return await self._on_server(lambda server: self._score(server, tokens, top_k))

    async def load_weights(self, source: WeightSource) -> None:
        if source.sender is None:
            if not list(Path(source.folder).glob("*.safetensors")):
                raise EngineError(f"there are no weights (*.safetensors) in {source.folder}")
            source = replace(source, folder=str(Path(source.folder).resolve()))
        async with self._gate.closed(self.spec.request_timeout_s):
            server = await self._server()
            self._source = source
            try:
                await self._push(server, source)
            except EngineError as error:
                if server.process is None:
                    raise
                log.warning(
                    "%s failed to load version %d and is started anew: %s", self.spec.name, source.version, error
                )
                await server.process.close()
                await self._server()  # has loaded them before it shows itself
            self.version = source.version

    async def _receive(self, server: Server, source: WeightSource, sender: WeightSender) -> None:
        """Weights over the process group, which a server joins when it gets its first ones."""
        offer = await _within(sender.offer(source.folder, self.bucket_bytes), "the offer of weights")
        group = self._group
        if group is None or group.server is not server:
            await self._leave()
            tensor_parallel = self.spec.tensor_parallel if self.on_gpu else 1
            meeting = Meeting.at(offer, num_ranks=1 + tensor_parallel, on_gpu=self.on_gpu, timeout_s=CONTROL_TIMEOUT_S)
            group = self._group = Group(meeting.group, sender, server)
            joining = sender.join(
                meeting.group, num_ranks=meeting.num_ranks, backend=meeting.backend, timeout_s=meeting.timeout_s
            )
            await self._both(self._join(server, meeting), joining, CONTROL_TIMEOUT_S)
        sending = sender.send(group.name, source.folder, self.bucket_bytes)
        taking = self._take(server, group.name, offer.buckets)
        await self._both(taking, sending, CONTROL_TIMEOUT_S * max(1, len(offer.buckets)))

    async def _both(self, server: Awaitable[None], sender: Awaitable[None], timeout_s: float) -> None:
        try:
            await together(server, sender, timeout_s)
        except BaseException:
            await self._leave()  # a broken group is of no more use
            raise

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.leave()

    async def sleep(self) -> None:
        """Give memory back; nothing to give on a CPU."""

    async def wake(self) -> None:
        """Take it again."""

    async def close(self) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        current.cancel()
        with contextlib.suppress(asyncio.CancelledError, TqppoError):
            await (await current).close()
        await self._leave()

    # Life and death.

    async def _server(self) -> Server:
        """The server that lives now; while one is being started, wait for it."""
        while True:
            if self._current is None:
                raise EngineError(f"{self.spec.name} is not running")
            server = await asyncio.shield(self._current)
            if server.is_alive:
                return server
            self._replace(server)

    async def _on_server(self, ask: Callable[[Server], Awaitable[Answer]]) -> Answer:
        try:
            return await ask(await self._server())
        except ServerDied as death:
            log.debug("a request died with its server and is asked again: %s", death)
        return await ask(await self._server())

    def _replace(self, dead: Server) -> None:
        """Start a successor, unless somebody else has."""
        current = self._current
        if current is None or not current.done() or current.cancelled() or current.exception() is not None:
            return
        if current.result() is dead:
            self._current = asyncio.ensure_future(self._boot_again(dead))
            self._current.add_done_callback(lambda task: task.cancelled() or task.exception())  # may be nobody asks

    async def _boot_again(self, dead: Server) -> Server:
        reason: EngineError = dead.death()
        await dead.close()
        while self._restarts < self.spec.max_restarts:
            self._restarts += 1
            log.warning("%s: restart %d of %d: %s", self.spec.name, self._restarts, self.spec.max_restarts, reason)
            try:
                return await self._boot()
            except ServerDied as error:
                reason = error
        raise EngineError(f"rollout.max_restarts = {self.spec.max_restarts} is used up: {reason}")

    async def _boot(self) -> Server:
        """A healthy server with the current weights, or no process at all."""
        python = engines.python_of(self.backend, self.spec.python)
        for attempt in itertools.count(1):
            server = self._launch(python, free_port(self.spec.host))
            try:
                await self._healthy(server)
                await self._inspect(server)
                if self._source is not None:
                    await self._push(server, self._source)
            except BaseException as error:
                await server.close()
                if isinstance(error, ServerDied) and "address already in use" in str(error) and attempt < NUM_PORTS:
                    continue
                raise
            assert server.process is not None, "just launched"
            self._succeed(server, server.process)
            return server
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _succeed(self, server: Server, process: ServerProcess) -> None:
        process.exited.add_done_callback(lambda _: self._replace(server))

    def _launch(self, python: str, port: int) -> Server:
        flags = to_flags(self.arguments() | self._user_arguments, negatable=self.negatable)
        log_path = Path(self.spec.log_dir) / f"{self.spec.name}.log" if self.spec.log_dir else ""
        grace_s = self.grace_s if not self.on_gpu else max(self.grace_s, 15.0)  # to give a GPU's memory back
        command = [*self.command(python, port), *flags]
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or self.spec.interface}
        process = ServerProcess(command, interface | self.environment(), log_path, grace_s=grace_s)
        log.info("%s: starting %s on port %d (log: %s)", self.spec.name, self.backend, port, process.log_path)
        return self._connect(f"http://{_reachable(self.spec.host)}:{port}", process, self.token)

    def _connect(self, url: str, process: ServerProcess | None, token: str) -> Server:
        connections = min(self.spec.max_running, MAX_CONNECTIONS) + 16
        return Server(self.spec.name, url, process=process, token=token, num_connections=connections)

    async def _healthy(self, server: Server) -> None:
        started = told = time.monotonic()
        assert server.process is not None, "only started servers are waited for"
        while not await server.is_healthy():
            await asyncio.wait({server.process.exited}, timeout=0.25)
            if not server.is_alive:
                raise server.death()
            now = time.monotonic()
            if now - started > self.spec.start_timeout_s:
                tail = server.process.tail()
                raise EngineError(f"{self.spec.name} was not healthy after {now - started:.0f} s; its log:\n{tail}")
            if now - told > 15:
                told = now
                log.info("%s: %.0f s: %s", self.spec.name, now - started, server.process.tail(1)[:120])
        log.info("%s: healthy after %.1f s", self.spec.name, time.monotonic() - started)

    async def _attach(self) -> Server:
        server = self._connect(self.spec.endpoint.rstrip("/"), None, os.environ.get(TOKEN_VARIABLE, ""))
        if not await server.is_healthy():
            await server.close()
            raise BackendError(f"no healthy {self.backend} server answers at {self.spec.endpoint}")
        await self._inspect(server)
        return server

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """As `validate-config` does; an engine may be made without a config."""
        for name in arguments:
            if instead := instead_of(self.backend, name):
                raise PreflightError(f"engine_args sets {name}, which tqppo sets itself for {self.backend}: {instead}")
        return {argument_name(name): value for name, value in arguments.items()}

    def _check_label(self, found: set[str]) -> None:
        """What the server says its answer was made by, against what we loaded."""
        if self.label is not None and found - {self.label}:
            raise EngineError(f"{self.spec.name} answered with weights {sorted(found)}, not {self.label!r}")

    def _check_model(self, served: str) -> None:
        """For servers that already ran: the same model, whatever the path to it."""
        wanted = self.spec.model.rstrip("/")
        if served.rstrip("/") != wanted and Path(served).name != Path(wanted).name:
            raise BackendError(
                f"the server at {self.spec.endpoint} has the model {served!r}; this run needs {wanted!r}"
            )


async def _within(answer: Awaitable[Answer], what: str) -> Answer:
    try:
        return await asyncio.wait_for(answer, CONTROL_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise EngineError(f"{what} did not come within {CONTROL_TIMEOUT_S:g} s") from None


def _reachable(host: str) -> str:
    """The address to call a server that binds to `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
