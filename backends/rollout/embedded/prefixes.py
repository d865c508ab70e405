"""Caches that running sessions keep between their turns, so that a turn computes its new tokens only.

The bytes of all caches stay within a budget; the cache that was left longest ago makes room for a new one. In
deterministic mode caches of ended sessions go between batches: what is evicted then does not depend on when they ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .rows import Ticket

PREFIX_PER_NEW_TOKEN = 4  # most tokens of a forward's caches, as a multiple of its most new tokens


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """The cache of these tokens: keys and values [layers, H, T, D]."""

    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def common_with(self, tokens: tuple[int, ...]) -> int:
        """How many tokens at the beginning of these are in the cache; their last one never counts."""
        most = min(len(self.tokens), len(tokens) - 1)
        if self.tokens[:most] == tokens[:most]:
            return most
        return next(place for place in range(most) if self.tokens[place] != tokens[place])


class KeptPrefixes:
    """One cache per session and sub-agent. Used between forwards only."""

    def __init__(self, budget_bytes: int, *, at_once: bool) -> None:
        self._budget = budget_bytes
        self._at_once = at_once
        self._kept: dict[str, KeptPrefix] = {}  # the one that was left longest ago first
        self._ended: set[str] = set()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ticket: Ticket) -> tuple[KeptPrefix, int] | None:
        """Remove the cache of the request's session; returns it with the number of tokens that the request shares."""
        found = self._pop(ticket.session) if ticket.session in self._kept else None
        length = found.common_with(ticket.tokens) if found is not None else 0
        return (found, length) if found is not None and length else None

    def wants(self, session: str) -> bool:
        return bool(self._budget and session) and session.partition("/")[0] not in self._ended

    def keep(self, session: str, tokens: tuple[int, ...], keys: Tensor, values: Tensor) -> None:
        """Copy the cache of a finished turn, [layers, H, T, D]. One that is larger than the budget is not kept."""
        num_bytes = keys.nbytes + values.nbytes
        if session in self._kept:
            self._pop(session)
        while self._kept and self.num_bytes + num_bytes > self._budget:
            self._pop(next(iter(self._kept)))
        if num_bytes <= self._budget:
            self._kept[session] = KeptPrefix(tokens, keys.clone(), values.clone())
            self.num_bytes += num_bytes

    def end(self, session: str) -> None:
        """A session makes no more requests. `settle` drops its cache and those of its sub-agents."""
        if self._budget:
            self._ended.add(session)

    def settle(self, *, between_batches: bool) -> None:
        """Drop caches of ended sessions, if this is the time for it."""
        if self._ended and (between_batches or self._at_once):
            for session in [each for each in self._kept if each.partition("/")[0] in self._ended]:
                self._pop(session)
        if between_batches:
            self._ended.clear()

    def clear(self) -> None:
        self._kept.clear()
        self._ended.clear()
        self.num_bytes = 0

    def _pop(self, session: str) -> KeptPrefix:
        found = self._kept.pop(session)
        self.num_bytes -= found.num_bytes
        return found


@dataclass(frozen=True, slots=True)
class ContinuedTurn:
    """A request that continues a kept cache, of which it shares the first `length` tokens."""

    ticket: Ticket
    prefix: KeptPrefix
    length: int

    @property
    def new_tokens(self) -> tuple[int, ...]:
        return self.ticket.tokens[self.length :]


class ContinuedCache(Cache):
    """The caches of one forward over new tokens of sessions: kept ones end at column `width`, new tokens follow it."""

    def __init__(self, extensions: Sequence[ContinuedTurn], num_new: int) -> None:
        super().__init__(layers=[])
        first = extensions[0].prefix
        self.width = max(each.length for each in extensions)
        self._shape = (len(extensions), first.keys.shape[1], self.width + num_new)
        self.begins = [self.width - each.length for each in extensions]
        self.keys = self._laid_out([(each.prefix.keys, each.length) for each in extensions])
        self.values = self._laid_out([(each.prefix.values, each.length) for each in extensions])

    def _laid_out(self, kept: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Per layer [U, H, width + new, D]. Columns that are masked are 0: they still take part in products."""
        layers, size = kept[0][0].shape[0], kept[0][0].shape[3]
        buffer = kept[0][0].new_zeros(layers, *self._shape, size)
        for row, (old, length) in enumerate(kept):
            buffer[:, row, :, self.width - length : self.width] = old[:, :, :length]
        return list(buffer.unbind(0))

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx][:, :, self.width :] = key_states
        self.values[layer_idx][:, :, self.width :] = value_states
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.width + query_length, 0

    def mask(self) -> Tensor:
        """Additive mask [U, 1, new, width + new]: a token sees its row's kept tokens and new ones up to itself."""
        like = self.keys[0]
        columns = torch.arange(self._shape[2], device=like.device)
        last = columns[self.width :]
        begins = torch.tensor(self.begins, device=like.device)
        is_hidden = (columns < begins[:, None, None, None]) | (columns > last[:, None])
        return is_hidden.to(like.dtype) * (torch.finfo(like.dtype).min / 2)

    def positions(self) -> Tensor:
        """Places of the new tokens in their sequences, [U, new]."""
        columns = torch.arange(self.width, self._shape[2], device=self.keys[0].device)
        return columns - torch.tensor(self.begins, device=columns.device)[:, None]


def continued_chunks(extensions: Sequence[ContinuedTurn], max_tokens: int) -> Iterator[list[ContinuedTurn]]:
    """Cut requests sorted by their new tokens into forwards that stay within the budgets of tokens."""
    chunk: list[ContinuedTurn] = []
    longest = 0
    for extension in extensions:
        num_new = len(extension.new_tokens)
        width = max(longest, extension.length)
        rows = len(chunk) + 1
        is_large = rows * num_new > max_tokens or rows * (width + num_new) > PREFIX_PER_NEW_TOKEN * max_tokens
        if chunk and is_large:
            yield chunk
            chunk, width = [], extension.length
        chunk.append(extension)
        longest = width
    if chunk:
        yield chunk
