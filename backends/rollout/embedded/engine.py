"""The rollout engine that runs everywhere: continuous batching over the model's own `transformers` class.

Forwards run on the event loop, which gets its turn after each, or in one worker thread if a forward takes long.
Requests in flight when `load_weights` or `sleep` is called finish first, with the old weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch

from tqppo.engines.capabilities import BUILT_IN
from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineCapabilities, EngineSpec, Request, Scores, WeightSource
from tqppo.weights.identity import WeightReport, check_identity

from .decoder import Decoder
from .forward import ModelForward
from .model import load_model
from .prefixes import KeptPrefixes
from .requests import PendingRequests, check_request, check_sequences
from .scoring import ScoringBatch, SequenceScorer
from .weights import Weights

CLOSE_S = 20.0  # for the computation under way; one that takes longer ends with the process
LONG_FORWARD = 1e9  # parameters × tokens: tens of milliseconds on one core

R = TypeVar("R")
State = Literal["not started", "ready", "draining", "asleep", "closed"]


async def is_done(work: asyncio.Task[None] | None, timeout_s: float) -> bool:
    """Wait for the work under way, if any; false if it is not done within `timeout_s`."""
    return work is None or bool((await asyncio.wait({work}, timeout=timeout_s))[0])


class EmbeddedRollout:
    """See `tqppo.protocols.RolloutEngine`."""

    capabilities: ClassVar[EngineCapabilities] = BUILT_IN["embedded"]

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._max_rows = max(1, spec.max_running)
        self._pending = PendingRequests(spec, self._max_rows)
        self._decoder: Decoder | None = None
        self._scorer: SequenceScorer | None = None
        self._weights: Weights | None = None
        self._num_parameters = 0
        self._thread: ThreadPoolExecutor | None = None
        self._work: asyncio.Task[None] | None = None
        self._exclusive = asyncio.Lock()
        self._state: State = "not started"

    async def start(self) -> None:
        if self._state != "not started":
            raise EngineError(f"{self._spec.name} cannot be started: it is {self._state}")
        torch.set_num_threads(self._spec.threads)
        self._thread = ThreadPoolExecutor(1, self._spec.name, torch.set_num_threads, (self._spec.threads,))
        model = await asyncio.get_running_loop().run_in_executor(self._thread, load_model, self._spec)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._weights = Weights(model)
        forward = ModelForward(model)
        kept = KeptPrefixes(self._spec.prefix_cache_bytes, at_once=not self._spec.deterministic)
        self._decoder = Decoder(forward, kept, max_rows=self._max_rows, eos_token_ids=self._spec.eos_token_ids)
        self._scorer = SequenceScorer(forward)
        self._state = "ready"

    # Requests.

    def expect(self, sessions: Sequence[str], batch: str = "") -> None:
        self._pending.expect(sessions, batch)

    def end_session(self, session: str) -> None:
        self._pending.end_session(session)
        if self._decoder is not None:
            self._decoder.kept.end(session)
            if self._work is None:
                self._decoder.kept.settle(between_batches=True)
        self._start_work()

    async def generate(self, request: Request) -> Completion:
        check_request(self._spec, request, self._ready().vocabulary)
        if self._pending.has(request.request_id):
            raise EngineError(f"a request called {request.request_id!r} is still running")
        pending = self._pending.add(request)
        self._start_work()
        try:
            return await pending.answer
        finally:
            self._pending.forget(pending)

    async def abort(self, request_id: str) -> None:
        """End a request early: it answers with the tokens that it has. Ignores ids of requests that are not running."""
        self._pending.abort(request_id, self._decoder.weight_version if self._decoder is not None else 0)

    async def score(self, tokens: Sequence[int], top_k: int = 0, *, start: int = 0, hidden: bool = False) -> Scores:
        return (await self.score_many([tokens], top_k, starts=[start], hidden=hidden))[0]

    async def score_many(
        self, sequences: Sequence[Sequence[int]], top_k: int = 0, *, starts: Sequence[int] = (), hidden: bool = False
    ) -> list[Scores]:
        batch = ScoringBatch([tuple(tokens) for tokens in sequences], starts or [0] * len(sequences), top_k, hidden)
        check_sequences(self._spec, batch, self._ready().vocabulary)
        answer = self._pending.add_scores(batch)
        self._start_work()
        return await answer

    # Weights and life.

    async def load_weights(self, source: WeightSource) -> None:
        async with self._exclusive:
            decoder = self._ready()
            assert self._weights is not None
            await self._drain()
            try:
                decoder.kept.clear()
                self._weights.load(source.folder)
                if source.checksums:
                    check_identity(self._spec.name, source.checksums, [WeightReport(self._weights.checksums())])
                decoder.weight_version = source.version
            finally:
                self._resume()

    async def sleep(self) -> None:
        """Free the cache; on a GPU also move the weights to the host. On a CPU the weights stay: they are mapped from
        the trainer's file and take no memory of their own."""
        async with self._exclusive:
            if self._state == "asleep":
                return
            decoder = self._ready()
            await self._drain()
            self._state = "asleep"
            decoder.free()
            decoder.model.to("cpu")

    async def wake(self, *, cache: bool = True) -> None:
        """The cache takes its memory when it is used."""
        async with self._exclusive:
            if self._state == "asleep" and self._decoder is not None:
                self._decoder.model.to(self._decoder.device)
                self._resume()

    def held_bytes(self) -> int:
        if self._decoder is None or self._state == "asleep":
            return 0
        weights: int = sum(tensor.nbytes for tensor in self._decoder.model.state_dict().values())
        return self._decoder.cache_bytes + weights

    async def close(self) -> None:
        self._state = "closed"
        self._pending.fail("it was closed")
        is_idle = await is_done(self._work, CLOSE_S)
        if self._thread is not None:
            self._thread.shutdown(wait=is_idle)
        self._thread = self._decoder = self._scorer = self._weights = None

    async def _drain(self) -> None:
        """Stop admitting requests and wait until every row has finished."""
        self._state = "draining"
        if not await is_done(self._work, self._spec.request_timeout_s):
            self._resume()
            rows = 0 if self._decoder is None else self._decoder.num_rows
            raise EngineError(
                f"{self._spec.name}: {rows} requests had not finished {self._spec.request_timeout_s:g} s after new "
                "weights, or sleep, were asked for (rollout.request_timeout_s)"
            )
        if self._state != "draining":
            raise EngineError(f"{self._spec.name} is {self._state}")

    def _resume(self) -> None:
        if self._state != "closed":
            self._state = "ready"
            self._start_work()

    def _ready(self) -> Decoder:
        if self._decoder is None or self._state not in ("ready", "draining"):
            raise EngineError(f"{self._spec.name} is {self._state}")
        return self._decoder

    # The work: one task while there is something to do.

    def _start_work(self) -> None:
        if self._work is None and self._state == "ready" and self._pending.is_ready:
            self._work = asyncio.get_running_loop().create_task(self._run())
            self._work.add_done_callback(self._work_ended)

    async def _run(self) -> None:
        decoder = self._ready()
        while self._state != "closed":
            if withdrawn := self._pending.withdrawn_rows(decoder.rows.tickets):
                self._pending.answer(decoder.drop(withdrawn))
            if self._state == "ready" and (batch := self._pending.take_scores()) is not None:
                assert self._scorer is not None  # one batch at a time, so that the decoder gets its turn
                scores = await self._compute(partial(self._scorer.score, batch), batch.num_tokens)
                self._pending.answer_scores(scores)
            decoder.kept.settle(between_batches=not decoder.num_rows and not self._pending.is_admitting)
            is_admitting = self._state == "ready"
            tickets = self._pending.admit(decoder.num_free, decoder.num_rows) if is_admitting else []
            if not tickets and not decoder.num_rows:
                return
            num_tokens = decoder.num_rows + sum(map(len, {ticket.tokens for ticket in tickets}))
            self._pending.answer(await self._compute(partial(decoder.advance, tickets), num_tokens))
            await asyncio.sleep(0)

    async def _compute(self, forward: Callable[[], R], num_tokens: int) -> R:
        if num_tokens * self._num_parameters < LONG_FORWARD:
            return forward()
        return await asyncio.get_running_loop().run_in_executor(self._thread, forward)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._work = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            if self._decoder is not None:
                self._decoder.reset()
            self._pending.fail("its work was cancelled" if error is None else f"{type(error).__name__}: {error}", error)
        if self._decoder is not None:
            self._decoder.kept.settle(between_batches=True)  # of sessions that ended since the last batch
        self._start_work()
