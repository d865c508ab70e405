"""The requests that callers of the embedded engine wait for: admitted, answered, withdrawn or failed.

Every request ends in a result or an error, so that no caller waits for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqppo.errors import EngineError
from tqppo.protocols import Completion, EngineSpec, Request, Scores

from .admission import Admission
from .rows import Ticket
from .scoring import ScoringBatch


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A `generate` call and the future that its caller awaits."""

    request: Request
    answer: asyncio.Future[Completion]
    order: tuple[int, ...] = field(init=False)
    family: str = field(init=False)

    def __post_init__(self) -> None:
        self.order, self.family = self.request.order, self.request.family


@dataclass(slots=True, eq=False)
class PendingScores:
    """A call that scores sequences, and the future that its caller awaits."""

    batch: ScoringBatch
    answer: asyncio.Future[list[Scores]]


class PendingRequests:
    """All calls that have no result yet."""

    def __init__(self, spec: EngineSpec, max_rows: int) -> None:
        self._spec = spec
        self._admission: Admission[PendingRequest] = Admission(deterministic=spec.deterministic, max_rows=max_rows)
        self._by_id: dict[str, PendingRequest] = {}
        self._by_ticket: dict[Ticket, PendingRequest] = {}  # those that decode
        self._withdrawn: set[PendingRequest] = set()  # decoding, to be dropped before the next step
        self._scores: deque[PendingScores] = deque()
        self._scoring: list[PendingScores] = []  # none or one
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is work for the decoder."""
        return self._admission.is_ready or bool(self._scores)

    @property
    def is_admitting(self) -> bool:
        """Whether some requests of the batch that decodes have no row yet."""
        return self._admission.is_admitting

    def has(self, request_id: str) -> bool:
        return request_id in self._by_id

    def expect(self, sessions: Sequence[str], batch: str) -> None:
        self._admission.expect(sessions, batch)
        self._watch_deadline()

    def end_session(self, session: str) -> None:
        self._admission.end(session)

    def add(self, request: Request) -> PendingRequest:
        pending = PendingRequest(request, asyncio.get_running_loop().create_future())
        self._by_id[request.request_id] = pending
        self._admission.add(pending)
        return pending

    def forget(self, pending: PendingRequest) -> None:
        """Remove a request whose caller has its result or has cancelled the call."""
        if pending.answer.cancelled():
            self._withdraw(pending, weight_version=0)
        self._by_id.pop(pending.request.request_id, None)
        self._admission.finish(pending)

    def abort(self, request_id: str, weight_version: int) -> None:
        pending = self._by_id.get(request_id)
        if pending is not None:
            self._withdraw(pending, weight_version)

    def admit(self, num_free: int, num_running: int) -> list[Ticket]:
        """Tickets of the requests that join the batch now."""
        tickets = []
        for pending in self._admission.take(num_free, num_running):
            request, tokens = pending.request, tuple(pending.request.tokens)
            limit = min(request.sampling.max_new_tokens, self._spec.max_context_tokens - len(tokens))
            ticket = Ticket(tokens, request.sampling, request.seed, limit, request.session)
            self._by_ticket[ticket] = pending
            tickets.append(ticket)
        return tickets

    def answer(self, finished: Sequence[tuple[Ticket, Completion]]) -> None:
        for ticket, completion in finished:
            pending = self._by_ticket.pop(ticket, None)  # None if the engine was closed during the forward
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(completion)

    def withdrawn_rows(self, tickets: Sequence[Ticket]) -> list[int]:
        """Rows whose requests were withdrawn since the last step."""
        if not self._withdrawn:
            return []
        rows = [row for row, ticket in enumerate(tickets) if self._by_ticket[ticket] in self._withdrawn]
        self._withdrawn.clear()
        return rows

    def add_scores(self, batch: ScoringBatch) -> asyncio.Future[list[Scores]]:
        pending = PendingScores(batch, asyncio.get_running_loop().create_future())
        self._scores.append(pending)
        return pending.answer

    def take_scores(self) -> ScoringBatch | None:
        """The next batch to score; those whose callers have gone are left out."""
        while self._scores:
            pending = self._scores.popleft()
            if not pending.answer.done():
                self._scoring = [pending]
                return pending.batch
        return None

    def answer_scores(self, results: list[Scores]) -> None:
        for pending in self._scoring:  # empty if the engine was closed during the forward
            if not pending.answer.done():
                pending.answer.set_result(results)
        self._scoring = []

    def fail(self, why: str, cause: BaseException | None = None) -> None:
        """Every pending call raises an error."""
        self._admission.clear()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        pending: list[PendingRequest | PendingScores] = [*self._by_id.values(), *self._scoring, *self._scores]
        for each in pending:
            if not each.answer.done():
                error = EngineError(f"{self._spec.name} ended this request: {why}")
                error.__cause__ = cause
                each.answer.set_exception(error)
        self._scores, self._scoring = deque(), []
        self._withdrawn.clear()
        self._by_ticket.clear()

    def _withdraw(self, pending: PendingRequest, weight_version: int) -> None:
        if not self._admission.remove(pending):
            self._withdrawn.add(pending)
        elif not pending.answer.done():
            pending.answer.set_result(Completion([], [], "abort", weight_version))

    def _watch_deadline(self) -> None:
        """Limit the wait while some sessions of a batch have asked and the others neither ask nor end.

        One timer looks when the first may be due: setting it at each request would cost more than all the rest.
        """
        if self._deadline is None and self._admission.has_batches:
            now, since = time.monotonic(), self._admission.stalled_since
            wait_s = self._spec.request_timeout_s - (0.0 if since is None else now - since)
            self._deadline = asyncio.get_running_loop().call_later(wait_s, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._deadline = None
        self._give_up_waiting()
        self._watch_deadline()

    def _give_up_waiting(self) -> None:
        since = time.monotonic() - self._spec.request_timeout_s
        for pending, missing in self._admission.give_up_waiting(since):
            if not pending.answer.done():
                more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
                pending.answer.set_exception(
                    EngineError(
                        f"{self._spec.name} waited {self._spec.request_timeout_s:g} s for the announced sessions "
                        f"{', '.join(missing[:3])}{more}, which neither asked nor ended"
                    )
                )


def check_request(spec: EngineSpec, request: Request, vocabulary: int) -> None:
    """Raise for a request that cannot be generated."""
    check_tokens(spec, request.tokens, vocabulary, most=spec.max_context_tokens - 1)
    sampling = request.sampling
    if sampling.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise EngineError(f"temperature and top_k must be at least 0, top_p above 0 and at most 1: {sampling}")


def check_tokens(spec: EngineSpec, tokens: Sequence[int], vocabulary: int, *, most: int) -> None:
    if not 0 < len(tokens) <= most:
        raise EngineError(
            f"{len(tokens)} tokens were given; {spec.name} takes 1 to {most}, "
            f"since max_context_tokens is {spec.max_context_tokens}"
        )
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise EngineError(f"token ids must be 0 to {vocabulary - 1}; found {min(tokens)} to {max(tokens)}")


def check_sequences(spec: EngineSpec, batch: ScoringBatch, vocabulary: int) -> None:
    """Raise for sequences that cannot be scored."""
    for tokens, start in zip(batch.tokens, batch.starts, strict=True):
        check_tokens(spec, tokens, vocabulary, most=spec.max_context_tokens)
        if not 0 <= start < len(tokens):
            raise EngineError(f"start is {start}; it may be 0 to {len(tokens) - 1} for {len(tokens)} tokens")
    if not 0 <= batch.top_k <= vocabulary:
        raise EngineError(f"top_k is {batch.top_k}; it may be 0 to {vocabulary}, the size of the vocabulary")
