"""The rows that decode: parallel arrays in batch order, and the tokens that each row has produced so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tqppo.protocols import Completion, FinishReason, Sampling

from .sampler import streams_of


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request as the decoder sees it. Equal only to itself, so that it identifies the request."""

    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    session: str = ""


class DecodingRows:
    """The first `count` entries of each array are the rows of the batch, in the order of the cache's rows."""

    def __init__(self, capacity: int, vocabulary: int, eos_token_ids: tuple[int, ...]) -> None:
        self.tickets: list[Ticket] = []
        self._table = np.zeros((7, capacity), dtype=np.int64)  # one table, so that moving a row is one operation
        (self.start, self.made, self.limit, self.stops, self.kind, self.slot, self._stream) = self._table
        self._free_slots = list(range(capacity))[::-1]
        self._tokens = np.zeros((capacity, 16), dtype=np.int64)  # by slot, so that output never moves
        self._logprobs = np.zeros((capacity, 16), dtype=np.float32)
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table = np.zeros((0, vocabulary), dtype=bool)
        self._kinds: dict[tuple[float, int, float], int] = {}
        self.kinds: list[tuple[float, int, float]] = []  # (temperature, top_k, top_p), by number

    def __len__(self) -> int:
        return len(self.tickets)

    def add(self, tickets: Sequence[Ticket], starts: Sequence[int]) -> None:
        """Append rows whose first tokens are in these columns."""
        begin, end = len(self), len(self) + len(tickets)
        self.tickets.extend(tickets)
        self.start[begin:end] = starts
        self.made[begin:end] = 0
        self.limit[begin:end] = [ticket.max_new_tokens for ticket in tickets]
        self.stops[begin:end] = [self._stop_set(ticket.sampling.stop_token_ids) for ticket in tickets]
        self.kind[begin:end] = [self._kind(ticket.sampling) for ticket in tickets]
        self.slot[begin:end] = [self._free_slots.pop() for _ in tickets]
        self._stream[begin:end] = streams_of([ticket.seed for ticket in tickets]).view(np.int64)

    def streams(self, begin: int = 0) -> np.ndarray:
        return self._stream[begin : len(self)].view(np.uint64)

    def record(self, tokens: np.ndarray, logprobs: np.ndarray, begin: int = 0) -> np.ndarray:
        """Append one token to each row from `begin` on. Returns bool [B], true for rows that it finishes."""
        rows = slice(begin, len(self))
        slots, made = self.slot[rows], self.made[rows]
        if made.max(initial=0) >= self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], axis=1)
            self._logprobs = np.concatenate([self._logprobs, np.zeros_like(self._logprobs)], axis=1)
        self._tokens[slots, made] = tokens
        self._logprobs[slots, made] = logprobs
        made += 1
        is_done: np.ndarray = self._stop_table[self.stops[rows], tokens] | (made >= self.limit[rows])
        return is_done

    def last_tokens(self) -> np.ndarray:
        rows = slice(0, len(self))
        tokens: np.ndarray = self._tokens[self.slot[rows], self.made[rows] - 1]
        return tokens

    def completions(self, rows: np.ndarray, weight_version: int, *, aborted: bool) -> list[Completion]:
        """The results of these rows."""
        slots, made = self.slot[rows], self.made[rows]
        longest = made.max(initial=0)
        tokens, logprobs = self._tokens[slots, :longest].tolist(), self._logprobs[slots, :longest].tolist()
        stopped = self._stop_table[self.stops[rows], self._tokens[slots, made - 1]].tolist()
        results = []
        for row, count in enumerate(made.tolist()):
            reason: FinishReason = "abort" if aborted else "stop" if stopped[row] else "length"
            results.append(Completion(tokens[row][:count], logprobs[row][:count], reason, weight_version))
        return results

    def remove(self, gone: np.ndarray) -> tuple[list[int], list[int]]:
        """Fill the holes `gone` (row numbers) with rows from the end; returns (targets, sources) of the moves."""
        left = len(self) - len(gone)
        self._free_slots.extend(self.slot[gone].tolist())
        is_gone = np.zeros(len(self), dtype=bool)
        is_gone[gone] = True
        targets = np.flatnonzero(is_gone[:left]).tolist()
        sources = (left + np.flatnonzero(~is_gone[left:])).tolist()
        self._table[:, targets] = self._table[:, sources]
        for target, source in zip(targets, sources, strict=True):
            self.tickets[target] = self.tickets[source]
        del self.tickets[left:]
        return targets, sources

    def _kind(self, sampling: Sampling) -> int:
        kind = (sampling.temperature, sampling.top_k, sampling.top_p)
        if kind not in self._kinds:
            self._kinds[kind] = len(self.kinds)
            self.kinds.append(kind)
        return self._kinds[kind]

    def _stop_set(self, extra: tuple[int, ...]) -> int:
        if extra not in self._stop_sets:
            flags = np.zeros((1, self._vocabulary), dtype=bool)
            flags[0, [t for t in (*self._eos, *extra) if 0 <= t < self._vocabulary]] = True
            self._stop_sets[extra] = len(self._stop_table)
            self._stop_table = np.concatenate([self._stop_table, flags])
        return self._stop_sets[extra]
