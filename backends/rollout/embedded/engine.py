"""The rollout engine that runs everywhere: our own continuous batching over the model's own `transformers` class.

Forwards run on the event loop, which gets its turn after each, or in one worker thread when a forward is long.
Requests in flight when `load_weights` or `sleep` is called finish first, with the old weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch

from tqppo.engines.capabilities import BUILT_IN
from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineCapabilities, EngineSpec, Request, Scores, WeightSource

from .admission import Admission
from .decoder import Decoder, Finished
from .forward import ModuleForward
from .model import load_model
from .plain import fastest_forward
from .rows import Ticket
from .weights import Weights

LONG_FORWARD = 1e9  # parameters × tokens: tens of milliseconds on one core

R = TypeVar("R")
State = Literal["not started", "ready", "draining", "asleep", "closed"]


@dataclass(slots=True, eq=False)
class Waiting:
    """A `generate` call and its answer to come."""

    request: Request
    order: tuple[int, ...]
    answer: asyncio.Future[Completion]


@dataclass(slots=True, eq=False)
class WaitingScore:
    tokens: tuple[int, ...]
    top_k: int
    answer: asyncio.Future[Scores]


class EmbeddedRollout:
    """See `tqppo.protocols.RolloutEngine`."""

    capabilities: ClassVar[EngineCapabilities] = BUILT_IN["embedded"]

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._max_rows = max(1, spec.max_running)
        self._admission: Admission[Waiting] = Admission(deterministic=spec.deterministic, max_rows=self._max_rows)
        self._requests: dict[str, Waiting] = {}
        self._scores: list[WaitingScore] = []
        self._scoring: list[WaitingScore] = []
        self._aborted: set[Waiting] = set()
        self._decoder: Decoder | None = None
        self._weights: Weights | None = None
        self._num_parameters = 0
        self._thread: ThreadPoolExecutor | None = None
        self._work: asyncio.Task[None] | None = None
        self._announced_deadline: asyncio.TimerHandle | None = None
        self._exclusive = asyncio.Lock()
        self._state: State = "not started"

    async def start(self) -> None:
        if self._state != "not started":
            raise EngineError(f"{self._spec.name} cannot be started: it is {self._state}")
        torch.set_num_threads(self._spec.threads)
        self._thread = ThreadPoolExecutor(1, self._spec.name, torch.set_num_threads, (self._spec.threads,))
        forward = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        self._num_parameters = sum(parameter.numel() for parameter in forward.model.parameters())
        self._weights = Weights(forward.model)
        self._decoder = Decoder(forward, max_rows=self._max_rows, eos_token_ids=self._spec.eos_token_ids)
        self._state = "ready"

    def _load(self) -> ModuleForward:
        return fastest_forward(load_model(self._spec), self._spec.max_context_tokens)

    # Requests.

    def expect(self, num_requests: int) -> None:
        """A negative number says that so many of the announced requests will not come."""
        self._admission.expect(num_requests)
        self._wake_up()

    async def generate(self, request: Request) -> Completion:
        try:
            self._check(request)
        except EngineError:
            self.expect(-1)  # it came, if not for long: the others must not wait for it
            raise
        waiting = Waiting(request, request.order, asyncio.get_running_loop().create_future())
        self._requests[request.request_id] = waiting
        self._admission.add(waiting)
        self._wake_up()
        try:
            return await waiting.answer
        finally:
            if waiting.answer.cancelled():
                self._give_up(waiting)
            self._requests.pop(request.request_id, None)

    async def abort(self, request_id: str) -> None:
        """End a request early: it answers with what it has. Nothing happens when it is not (or no longer) here."""
        waiting = self._requests.get(request_id)
        if waiting is not None:
            self._give_up(waiting)

    async def score(self, tokens: Sequence[int], top_k: int = 0) -> Scores:
        decoder = self._ready()
        sequence = tuple(tokens)
        self._check_tokens(sequence, self._spec.max_context_tokens)
        if not 0 <= top_k <= decoder.vocabulary:
            raise EngineError(f"top_k is {top_k}; it may be 0 to {decoder.vocabulary}, the size of the vocabulary")
        waiting = WaitingScore(sequence, top_k, asyncio.get_running_loop().create_future())
        self._scores.append(waiting)
        self._wake_up()
        return await waiting.answer

    # Weights and life.

    async def load_weights(self, source: WeightSource) -> None:
        async with self._exclusive:
            decoder = self._ready()
            assert self._weights is not None
            await self._drain()
            try:
                self._weights.load(source.folder)
                decoder.weight_version = source.version
            finally:
                self._resume()

    async def sleep(self) -> None:
        """Free the cache; on a GPU also the weights, which move to the host. On a CPU they stay: mapped from the
        trainer's file, they are no memory of ours."""
        async with self._exclusive:
            if self._state == "asleep":
                return
            decoder = self._ready()
            await self._drain()
            self._state = "asleep"
            decoder.free()
            decoder.model.to("cpu")

    async def wake(self) -> None:
        async with self._exclusive:
            if self._state == "asleep" and self._decoder is not None:
                self._decoder.model.to(self._decoder.device)
                self._resume()

    async def close(self) -> None:
        self._state = "closed"
        self._fail("it was closed")
        if self._work is not None:
            await asyncio.wait({self._work})
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._decoder = self._weights = None

    async def _drain(self) -> None:
        """Admit nothing more and wait until every row has finished."""
        self._state = "draining"
        if self._work is not None:
            await asyncio.wait({self._work})
        if self._state != "draining":
            raise EngineError(f"{self._spec.name} is {self._state}")

    def _resume(self) -> None:
        if self._state != "closed":
            self._state = "ready"
            self._wake_up()

    # The work: one task while there is something to do.

    def _wake_up(self) -> None:
        self._watch_announced()
        if self._work is None and self._state == "ready" and (self._admission.is_ready or self._scores):
            self._work = asyncio.get_running_loop().create_task(self._run())
            self._work.add_done_callback(self._work_ended)

    async def _run(self) -> None:
        decoder = self._ready()
        while self._state != "closed":
            if self._aborted:
                self._drop_aborted(decoder)
            if self._state == "ready" and self._scores:
                await self._score(decoder)
            is_admitting = self._state == "ready"
            taken = self._admission.take(decoder.num_free, decoder.num_rows) if is_admitting else []
            if not taken and not decoder.num_rows:
                return
            tickets = [self._ticket(waiting) for waiting in taken]
            num_tokens = decoder.num_rows + sum(map(len, {ticket.tokens for ticket in tickets}))
            self._answer(await self._compute(partial(decoder.advance, tickets), num_tokens))
            await asyncio.sleep(0)

    async def _score(self, decoder: Decoder) -> None:
        batch = self._scoring = self._scores
        self._scores = []
        forward = partial(decoder.score, [s.tokens for s in batch], [s.top_k for s in batch])
        results = await self._compute(forward, sum(len(s.tokens) for s in batch))
        for waiting, scores in zip(batch, results, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(scores)
        self._scoring = []

    async def _compute(self, forward: Callable[[], R], num_tokens: int) -> R:
        if num_tokens * self._num_parameters < LONG_FORWARD:
            return forward()
        return await asyncio.get_running_loop().run_in_executor(self._thread, forward)

    def _ticket(self, waiting: Waiting) -> Ticket:
        request = waiting.request
        tokens = tuple(request.tokens)
        limit = min(request.sampling.max_new_tokens, self._spec.max_context_tokens - len(tokens))
        return Ticket(tokens, request.sampling, request.seed, limit, waiting)

    def _answer(self, finished: Finished) -> None:
        for ticket, completion in finished:
            if not ticket.owner.answer.done():
                ticket.owner.answer.set_result(completion)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._work = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            if self._decoder is not None:
                self._decoder.reset()
            self._fail("its work was cancelled" if error is None else f"{type(error).__name__}: {error}", error)
        self._wake_up()

    # When things do not go to plan.

    def _give_up(self, waiting: Waiting) -> None:
        if not self._admission.remove(waiting):
            self._aborted.add(waiting)
        elif not waiting.answer.done():
            version = self._decoder.weight_version if self._decoder is not None else 0
            waiting.answer.set_result(Completion([], [], "abort", version))

    def _drop_aborted(self, decoder: Decoder) -> None:
        rows = [row for row, ticket in enumerate(decoder.rows.tickets) if ticket.owner in self._aborted]
        self._aborted.clear()
        if rows:
            self._answer(decoder.drop(rows))

    def _fail(self, why: str, cause: BaseException | None = None) -> None:
        """Everybody who waits gets an error: nobody waits for ever."""
        self._admission.clear()
        self._watch_announced()
        everybody: list[Waiting | WaitingScore] = [*self._requests.values(), *self._scoring, *self._scores]
        for waiting in everybody:
            if not waiting.answer.done():
                error = EngineError(f"{self._spec.name} ended this request: {why}")
                error.__cause__ = cause
                waiting.answer.set_exception(error)
        self._scores, self._scoring = [], []
        self._aborted.clear()

    def _watch_announced(self) -> None:
        """A deadline while part of an announced batch is here and the rest is not."""
        if not self._admission.gathering:
            if self._announced_deadline is not None:
                self._announced_deadline.cancel()
                self._announced_deadline = None
        elif self._announced_deadline is None:
            loop = asyncio.get_running_loop()
            self._announced_deadline = loop.call_later(self._spec.request_timeout_s, self._announced_never_came)

    def _announced_never_came(self) -> None:
        missing, here = self._admission.num_expected, self._admission.give_up_gathering()
        self._announced_deadline = None
        for waiting in here:
            if not waiting.answer.done():
                waiting.answer.set_exception(
                    EngineError(
                        f"{self._spec.name} waited {self._spec.request_timeout_s:g} s for {missing} of "
                        f"{missing + len(here)} announced requests; announce fewer with expect(-{missing})"
                    )
                )

    def _ready(self) -> Decoder:
        if self._decoder is None or self._state not in ("ready", "draining"):
            raise EngineError(f"{self._spec.name} is {self._state}")
        return self._decoder

    def _check(self, request: Request) -> None:
        self._check_tokens(request.tokens, self._spec.max_context_tokens - 1)
        sampling = request.sampling
        if sampling.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise EngineError(f"temperature and top_k must be at least 0, top_p above 0 and at most 1: {sampling}")
        if request.request_id in self._requests:
            raise EngineError(f"a request called {request.request_id!r} is still running")

    def _check_tokens(self, tokens: Sequence[int], most: int) -> None:
        vocabulary = self._ready().vocabulary
        if not 0 < len(tokens) <= most:
            raise EngineError(
                f"{len(tokens)} tokens were given; {self._spec.name} takes 1 to {most}, "
                f"since max_context_tokens is {self._spec.max_context_tokens}"
            )
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise EngineError(f"token ids must be 0 to {vocabulary - 1}; found {min(tokens)} to {max(tokens)}")
