"""The key-value cache of the embedded engine: one preallocated buffer for all layers, rows aligned at their last token.

Every row ends at the same column, the `cursor`, so a decoding step writes one column, attention reads
the columns from the longest row's first token on, and a mask is needed only while lengths differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tqppo.errors import EngineError

KeysAndValues = tuple[Tensor, Tensor]


class PrefillCache(Cache):
    """Holds the keys and values of one forward over new prompts, without copying them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []  # per layer [U, H, T, D]
        self.values: list[Tensor] = []

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx != len(self.keys):
            raise EngineError("the embedded engine needs a model whose layers each have a key-value cache of their own")
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class DecodeCache(Cache):
    """Keys and values of the rows that decode, [layers, rows, H, columns, D].

    Each batch lays the buffer out no wider than it needs: rows that are far apart in memory are slow to read.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.mask: Tensor | None = None  # [rows, 1, 1, columns]: 0 from a row's first token on, very negative before
        self.num_rows = 0
        self.first = 0  # column of the longest row's first token
        self.cursor = 0  # column the next token goes to

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.mask) if tensor is not None)

    @property
    def num_columns(self) -> int:
        return 0 if self.keys is None else self.keys.shape[3]

    # Called by the model while it decodes one token per row.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None, "decoding before anything was admitted"
        assert self.values is not None
        keys, values = self.keys[layer_idx, : self.num_rows], self.values[layer_idx, : self.num_rows]
        keys[:, :, self.cursor : self.cursor + 1] = key_states
        values[:, :, self.cursor : self.cursor + 1] = value_states
        window = slice(self.first, self.cursor + 1)
        return keys[:, :, window], values[:, :, window]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cursor - self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.cursor - self.first + query_length, 0

    def window_mask(self) -> Tensor:
        """Additive mask of the coming step, [rows, 1, 1, columns read]."""
        assert self.mask is not None
        return self.mask[: self.num_rows, :, :, self.first : self.cursor + 1]

    # Called by the decoder between forwards.

    def make_room(self, *, num_rows: int, num_columns: int, like: PrefillCache | None = None) -> None:
        """Provide at least this many rows and columns; existing rows keep their content.

        Without rows the old memory is reused in the new shape. The first time, `like` gives the shape of the layers.
        """
        if self.keys is None or self.values is None or self.mask is None:
            if like is None:
                return
            shapes = {(k.shape[1::2], v.shape[1::2]) for k, v in zip(like.keys, like.values, strict=True)}
            if len(shapes) != 1:
                raise EngineError("the embedded engine needs a model whose layers have caches of one shape")
            self.keys, self.values = _layers(like.keys), _layers(like.values)
            self.mask = like.keys[0].new_zeros(0, 1, 1, 0)
        elif self.num_rows:
            num_rows, num_columns = max(num_rows, self.mask.shape[0]), max(num_columns, self.mask.shape[3])
        if (num_rows, num_columns) != (self.mask.shape[0], self.mask.shape[3]):
            self.keys = self._laid_out(self.keys, (1, num_rows), (3, num_columns))
            self.values = self._laid_out(self.values, (1, num_rows), (3, num_columns))
            self.mask = self._laid_out(self.mask, (0, num_rows), (3, num_columns))

    def _laid_out(self, old: Tensor, *sizes: tuple[int, int]) -> Tensor:
        """The tensor with other sizes, given as (dimension, size).

        New memory is zeroed: a masked column still takes part in products, so it must be finite. Old memory is.
        """
        shape = list(old.shape)
        for dimension, size in sizes:
            shape[dimension] = size
        if not self.num_rows and math.prod(shape) * old.element_size() <= old.untyped_storage().nbytes():
            return torch.as_strided(old, shape, old.new_empty(shape, device="meta").stride(), 0)
        new = old.new_zeros(shape)
        if self.num_rows:
            new[tuple(slice(size) for size in old.shape)] = old
        return new

    def place(self, prefill: PrefillCache, source: Tensor, lengths: Sequence[int]) -> None:
        """Append rows that end at the cursor: prompts `source` [n] of the prefill, with these ascending lengths."""
        assert self.keys is not None
        assert self.values is not None
        assert self.mask is not None
        begin = self.num_rows
        self.num_rows += len(lengths)
        for buffer, layers in ((self.keys, prefill.keys), (self.values, prefill.values)):
            prompts = _selected(layers, source)  # [layers, n, H, T, D]
            place = 0
            for length, rows in groupby(lengths):
                end = place + sum(1 for _ in rows)
                target = buffer[:, begin + place : begin + end, :, self.cursor - length : self.cursor]
                target.copy_(prompts[:, place:end, :, :length])
                place = end
        columns = torch.arange(self.mask.shape[3], device=self.mask.device)
        starts = self.cursor - torch.tensor(lengths, device=self.mask.device)
        is_before = columns < starts[:, None, None, None]
        self.mask[begin : self.num_rows] = is_before * (torch.finfo(self.mask.dtype).min / 2)

    def move_rows(self, targets: Sequence[int], sources: Sequence[int], num_rows: int) -> None:
        """Copy row `sources[i]` over row `targets[i]`, then keep only the first `num_rows`."""
        assert self.keys is not None
        assert self.values is not None
        assert self.mask is not None
        if targets:
            # Row by row: an indexed copy of windows, which are not contiguous, is many times slower.
            for buffer in (self.keys, self.values):
                window = buffer.narrow(3, self.first, self.cursor - self.first)
                for target, source in zip(targets, sources, strict=True):
                    window[:, target].copy_(window[:, source])
            where, whence = torch.tensor([targets, sources], device=self.mask.device)
            self.mask.index_copy_(0, where, self.mask.index_select(0, whence))
        self.num_rows = num_rows

    def shift(self, columns: int) -> None:
        """Move all rows right by some columns, or left if negative."""
        assert self.mask is not None
        size, rows = self.cursor - self.first, self.num_rows
        for buffer in (self.keys, self.values):
            assert buffer is not None
            window = buffer[:, :rows].narrow(3, self.first, size).clone()
            buffer[:, :rows].narrow(3, self.first + columns, size).copy_(window)
        mask = self.mask[:rows].narrow(3, self.first, size).clone()
        self.first, self.cursor = self.first + columns, self.cursor + columns
        self.mask[:rows, :, :, self.first : self.cursor] = mask
        self.mask[:rows, :, :, self.cursor :] = 0
        self.mask[:rows, :, :, : self.first] = torch.finfo(self.mask.dtype).min / 2

    def clear(self) -> None:
        """Discard the rows and keep the memory."""
        self.num_rows = self.first = self.cursor = 0

    def free(self) -> None:
        self.clear()
        self.keys = self.values = self.mask = None


def _layers(layers: list[Tensor]) -> Tensor:
    """An empty buffer [layers, 0, H, 0, D]."""
    _, heads, _, size = layers[0].shape
    return layers[0].new_zeros(len(layers), 0, heads, 0, size)


def _selected(layers: list[Tensor], rows: Tensor) -> Tensor:
    """Rows [n] of each layer's [U, H, T, D], as one tensor [layers, n, H, T, D]."""
    result = layers[0].new_empty(len(layers), len(rows), *layers[0].shape[1:])
    for layer, target in zip(layers, result, strict=True):
        torch.index_select(layer.contiguous(), 0, rows, out=target)  # index_select is slow on other layouts
    return result
