"""The rollout engine in front of a server: the contract, the same for every kind of server.

`api.py` has what differs between servers, `lifecycle.py` starts and restarts them, `weights.py` loads weights into
them. A request whose server dies is sent once more to the next server, with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineCapabilities, EngineSpec, Incident, Request, Scores, WeightSource

from .api import CONTROL_TIMEOUT_S, EnginePart, ServerApi, tokens_left
from .gate import Gate
from .lifecycle import MAX_CONNECTIONS, ServerLifecycle
from .scores import check_sequence, no_scores
from .weights import WeightLoader

log = logging.getLogger(__name__)
ABORT_TIMEOUT_S = 5.0  # to end a request whose caller was cancelled


class RunningRequests:
    """Ids of the requests at a server. Each attempt gets an id of its own, so that ids never repeat there."""

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}
        self._numbers = itertools.count()

    def of(self, request_id: str) -> tuple[str, ...]:
        """The server's ids of one of the caller's requests."""
        return tuple(self._ids.get(request_id, ()))

    @contextmanager
    def track(self, request_id: str) -> Iterator[str]:
        server_id = f"{request_id}.{next(self._numbers)}"
        self._ids.setdefault(request_id, set()).add(server_id)
        try:
            yield server_id
        finally:
            self._ids[request_id].discard(server_id)
            if not self._ids[request_id]:
                del self._ids[request_id]


class ServerEngine:
    """A rollout engine behind HTTP. See `protocols.RolloutEngine` for the contract."""

    api_type: ClassVar[type[ServerApi]]
    capabilities: ClassVar[EngineCapabilities]

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.version = 0
        self.api = self.api_type(spec)
        self.loader = WeightLoader(self.api)
        self.servers = ServerLifecycle(self.api, prepare=self.loader.restore)
        self._gate = Gate()
        # A request's clock starts when it is sent, so it waits here for its turn and not for a free connection.
        self._sending = asyncio.Semaphore(max(1, min(spec.max_running, MAX_CONNECTIONS)))
        self._asleep: set[EnginePart] = set()
        self._requests = RunningRequests()

    async def start(self) -> None:
        await self.servers.start()

    def take_incidents(self) -> list[Incident]:
        """The servers that died and were started again since the last call."""
        return self.servers.take_incidents()

    def expect(self, sessions: Sequence[str], batch: str = "") -> None:
        """Does nothing: servers batch requests as they come."""

    def end_session(self, session: str) -> None:
        """Does nothing: servers keep the prefixes that they saw last."""

    async def generate(self, request: Request) -> Completion:
        tokens_left(self.spec, request)
        with self._requests.track(request.request_id) as server_id:
            async with self._sending, self._gate.passing(self.spec.request_timeout_s):
                try:
                    completion = await self.servers.call(lambda server: self.api.generate(server, request, server_id))
                except asyncio.CancelledError:
                    await self._abort_at_server(server_id)
                    raise
                return replace(completion, weight_version=self.version)

    async def _abort_at_server(self, server_id: str) -> None:
        """End a request whose caller has gone, so that the server does not decode for nothing."""

        async def abort() -> None:
            await self.api.abort(await self.servers.live(), server_id)

        with contextlib.suppress(EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(abort(), ABORT_TIMEOUT_S)

    async def abort(self, request_id: str) -> None:
        """Returns when the request has ended. Repeats the order until then: it may overtake the request itself."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        while (running := self._requests.of(request_id)) and time.monotonic() < deadline:
            for server_id in running:
                await self.api.abort(await self.servers.live(), server_id)
            await asyncio.sleep(0.02)

    async def score(self, tokens: Sequence[int], top_k: int = 0, *, start: int = 0, hidden: bool = False) -> Scores:
        if hidden and not self.capabilities.score_hidden:
            raise EngineError(f"{self.api.backend} returns no hidden states; the embedded engine does")
        check_sequence(self.spec, tokens, start)
        if start == len(tokens) - 1:
            return no_scores(len(tokens), top_k)
        async with self._sending, self._gate.passing(self.spec.request_timeout_s):
            return await self.servers.call(lambda server: self.api.score(server, tokens, top_k, start, hidden=hidden))

    async def score_many(
        self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, starts: Sequence[int] = (), hidden: bool = False
    ) -> list[Scores]:
        """Servers batch requests as they come, so these are sent one by one, all at once."""
        pairs = zip(sequences, starts or [0] * len(sequences), strict=True)
        calls = [self.score(tokens, top_k, start=start, hidden=hidden) for tokens, start in pairs]
        return list(await asyncio.gather(*calls))

    async def load_weights(self, source: WeightSource) -> None:
        if source.sender is None:
            if not list(Path(source.folder).glob("*.safetensors")):
                raise EngineError(f"there are no weights (*.safetensors) in {source.folder}")
            source = replace(source, folder=str(Path(source.folder).resolve()))
        async with self._gate.closed(self.spec.request_timeout_s):
            server = await self.servers.live()
            try:
                await self.loader.load(server, source)
            except EngineError as error:
                if server.process is None:
                    raise
                log.warning("%s failed to load version %d and is restarted: %s", self.spec.name, source.version, error)
                await server.process.close()
                await self.servers.live()  # a new server has loaded the weights before it is handed out
            self.version = source.version

    async def sleep(self) -> None:
        if self.api.on_gpu and len(self._asleep) < 2:
            await self.wake()  # a server sleeps as a whole
            await self.api.sleep(await self.servers.live())
            self._asleep = {"weights", "cache"}

    async def wake(self, *, cache: bool = True) -> None:
        """Servers wake part by part: a part that is awake must not be woken again."""
        wanted: tuple[EnginePart, ...] = ("weights", "cache") if cache else ("weights",)
        for part in wanted:
            if part in self._asleep:
                await self.api.wake(await self.servers.live(), part)
                self._asleep.remove(part)

    def held_bytes(self) -> int | None:
        return 0 if self._asleep or not self.api.on_gpu else None

    async def close(self) -> None:
        await self.servers.close()
