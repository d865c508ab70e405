"""Continuous batching over a `transformers` model: admit prompts, advance all rows by a token, return finished ones.

Synchronous and without asyncio: the engine calls `advance`, one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tqppo.errors import EngineError
from tqppo.protocols import Completion

from .forward import ModelForward, length_chunks, padded
from .kv import DecodeCache, PrefilledLayers
from .prefixes import ContinuedCache, ContinuedTurn, KeptPrefixes, continued_chunks
from .rows import DecodingRows, Ticket
from .sampler import sample, uniforms

PREFILL_TOKENS = 8192  # most tokens of one forward, padding included
SPARE_COLUMNS = 64  # columns of the cache beyond the prompts, and the step in which it grows

Finished = list[tuple[Ticket, Completion]]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Requests whose tokens one forward has computed: request i is row `source[i]` of the cache."""

    tickets: Sequence[Ticket]
    cache: PrefilledLayers
    source: Tensor  # [n]
    begins: Sequence[int] | None  # columns of the first tokens; None: all 0
    logits: Tensor  # [n, V]


class Decoder:
    """Rows decode together; a finished row leaves at once and another request takes its place."""

    def __init__(
        self, forward: ModelForward, kept: KeptPrefixes, *, max_rows: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.model, self.device, self.vocabulary = forward.model, forward.device, forward.vocabulary
        self._forward = forward
        self.kept = kept
        self.num_prefilled = 0  # tokens of prompts that were computed, since the start
        self._reused: dict[Ticket, int] = {}  # tokens that came from a kept cache
        self.max_rows = max_rows
        self.eos_token_ids = eos_token_ids
        self.weight_version = 0
        self.rows = DecodingRows(max_rows, self.vocabulary, eos_token_ids)
        self._cache = DecodeCache()
        self._starts: Tensor | None = None  # columns of the rows' first tokens [B]; None if all are equal

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_free(self) -> int:
        return self.max_rows - len(self.rows)

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    @torch.inference_mode()
    def advance(self, tickets: Sequence[Ticket]) -> Finished:
        """Admit these requests, then give every row its next token."""
        finished = self._admit(tickets) if tickets else []
        if self.rows:
            finished += self._step()
        return finished

    @torch.inference_mode()
    def drop(self, rows: Sequence[int]) -> Finished:
        """End rows early; returns what they have so far."""
        gone = np.array(sorted(rows), dtype=np.int64)
        return self._leave(gone, aborted=True)

    def reset(self) -> None:
        """Discard every row and every kept cache after a failure."""
        self.kept.clear()
        self._reused.clear()
        self.rows = DecodingRows(self.max_rows, self.vocabulary, self.eos_token_ids)
        self._cache.free()
        self._starts = None

    def free(self) -> None:
        """Free the caches; there must be no rows."""
        assert not self.rows, "rows are still decoding"
        self.kept.clear()
        self._cache.free()

    # Admission.

    def _admit(self, tickets: Sequence[Ticket]) -> Finished:
        """Compute the new tokens of each request, place a row per request, sample the first tokens."""
        groups: dict[tuple[int, ...], list[Ticket]] = {}
        extensions: list[ContinuedTurn] = []
        for ticket in tickets:
            if found := self.kept.take(ticket):
                extensions.append(ContinuedTurn(ticket, *found))
            else:
                groups.setdefault(ticket.tokens, []).append(ticket)
        begin, logits = len(self.rows), []
        for new in chain(self._prefilled(groups), self._extended(extensions)):
            if len(self.rows) == begin:
                self._make_room(tickets, max(len(ticket.tokens) for ticket in tickets), new.cache)
            self._place(new)
            logits.append(new.logits)
        self._batch_changed()
        return self._take_tokens(torch.cat(logits) if len(logits) > 1 else logits[0], begin)

    def _prefilled(self, groups: Mapping[tuple[int, ...], Sequence[Ticket]]) -> Iterator[NewRows]:
        """Compute each distinct prompt once."""
        for chunk in length_chunks(sorted(groups, key=len), PREFILL_TOKENS):
            last = torch.tensor([len(prompt) - 1 for prompt in chunk], device=self.device)
            cache, logits = self._forward.prefill(padded(chunk, self.device), last)
            source = torch.tensor([i for i, prompt in enumerate(chunk) for _ in groups[prompt]], device=self.device)
            tickets = [ticket for prompt in chunk for ticket in groups[prompt]]
            self.num_prefilled += sum(map(len, chunk))
            yield NewRows(tickets, cache, source, None, logits.index_select(0, source))

    def _extended(self, extensions: Sequence[ContinuedTurn]) -> Iterator[NewRows]:
        """Compute the tokens that come after kept caches."""
        ordered = sorted(extensions, key=lambda each: (len(each.new_tokens), each.length))
        for chunk in continued_chunks(ordered, PREFILL_TOKENS):
            new = [each.new_tokens for each in chunk]
            cache = ContinuedCache(chunk, len(new[-1]))
            last = torch.tensor([len(tokens) - 1 for tokens in new], device=self.device)
            logits = self._forward.extend(padded(new, self.device), last, cache)
            self._reused.update({each.ticket: each.length for each in chunk})
            self.num_prefilled += sum(map(len, new))
            source = torch.arange(len(chunk), device=self.device)
            yield NewRows([each.ticket for each in chunk], cache, source, cache.begins, logits)

    def _place(self, new: NewRows) -> None:
        lengths = [len(ticket.tokens) for ticket in new.tickets]
        self._cache.place(new.cache, new.source, lengths, new.begins)
        self.rows.add(new.tickets, [self._cache.cursor - length for length in lengths])

    def _make_room(self, tickets: Sequence[Ticket], longest: int, like: PrefilledLayers) -> None:
        """Make room in the cache: rows for the new requests, and columns left of the cursor for the longest prompt."""
        cache, num_rows = self._cache, len(self.rows) + len(tickets)
        need = max(min(ticket.max_new_tokens, SPARE_COLUMNS) + len(ticket.tokens) for ticket in tickets)
        if not self.rows:
            cache.clear()
            cache.make_room(num_rows=num_rows, num_columns=need, like=like)
            cache.cursor = cache.first = longest
            return
        cache.make_room(num_rows=num_rows, num_columns=need)
        if longest > cache.cursor:
            self._shift(longest - cache.cursor)

    def _make_column(self) -> None:
        """Make room for the next token: move the rows left if that frees half the buffer, else widen the buffer."""
        cache = self._cache
        if cache.cursor == cache.num_columns:
            if 2 * cache.first >= cache.num_columns:
                self._shift(-cache.first)
            else:
                cache.make_room(num_rows=len(self.rows), num_columns=cache.num_columns + SPARE_COLUMNS)

    # Decoding.

    def _step(self) -> Finished:
        self._make_column()
        tokens = torch.from_numpy(self.rows.last_tokens()).to(self.device)
        logits = self._forward.decode(tokens, self._cache, self._starts)
        self._cache.cursor += 1
        return self._take_tokens(logits)

    def _take_tokens(self, logits: Tensor, begin: int = 0) -> Finished:
        """Sample one token for each row from `begin` on; finished rows leave."""
        tokens, logprobs = self._sample(logits, begin)
        if not np.isfinite(logprobs).all():
            raise EngineError(f"the model's logits are not finite numbers (weights of version {self.weight_version})")
        is_done = self.rows.record(tokens, logprobs, begin)
        gone = begin + np.flatnonzero(is_done)
        return self._leave(gone) if len(gone) else []

    def _sample(self, logits: Tensor, begin: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows
        uniform = uniforms(rows.streams(begin), rows.made[begin : len(rows)])
        kinds = rows.kind[begin : len(rows)]
        if (kinds == kinds[0]).all():
            temperature, top_k, top_p = rows.kinds[kinds[0]]
            tokens, logprobs = sample(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p)
            return tokens.cpu().numpy(), logprobs.cpu().numpy()
        all_tokens, all_logprobs = np.empty(len(kinds), np.int64), np.empty(len(kinds), np.float32)
        for kind in np.unique(kinds):
            where = np.flatnonzero(kinds == kind)
            temperature, top_k, top_p = rows.kinds[kind]
            part = logits.index_select(0, torch.from_numpy(where).to(self.device))
            tokens, logprobs = sample(part, uniform[where], temperature=temperature, top_k=top_k, top_p=top_p)
            all_tokens[where], all_logprobs[where] = tokens.cpu().numpy(), logprobs.cpu().numpy()
        return all_tokens, all_logprobs

    def _leave(self, gone: np.ndarray, *, aborted: bool = False) -> Finished:
        rows = self.rows
        completions = rows.completions(gone, self.weight_version, aborted=aborted)
        finished: Finished = []
        for row, completion in zip(gone.tolist(), completions, strict=True):
            ticket = rows.tickets[row]
            if ticket in self._reused:
                completion = replace(completion, reused_tokens=self._reused.pop(ticket))
            finished.append((ticket, completion))
            if not aborted and self.kept.wants(ticket.session):
                tokens = (*ticket.tokens, *completion.tokens[:-1])  # the last one has not been computed
                self.kept.keep(ticket.session, tokens, *self._cache.row(row, int(rows.start[row])))
        targets, sources = rows.remove(gone)
        self._cache.move_rows(targets, sources, len(rows))
        self._batch_changed()
        return finished

    def _batch_changed(self) -> None:
        starts = self.rows.start[: len(self.rows)]
        if not len(starts):
            self._cache.clear()
            self._starts = None
            return
        self._cache.first = int(starts.min())
        equal = self._cache.first == starts.max()
        self._starts = None if equal else torch.from_numpy(starts.copy()).to(self.device)

    def _shift(self, columns: int) -> None:
        self._cache.shift(columns)
        self.rows.start[: len(self.rows)] += columns
        self._batch_changed()
