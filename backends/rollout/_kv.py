"""The key-value cache of the embedded engine: one preallocated buffer for all layers, rows aligned at their last token.

Every row ends at the same column, the `cursor`, so a decoding step writes one column, attention reads
the columns from the longest row's first token on, and a mask is needed only while lengths differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tqppo.errors import EngineError


class PrefillCache(Cache):
    """Keeps the keys and values of one forward over fresh prompts as they are: no copy, no past."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []  # per layer [U, H, T, D]
        self.values: list[Tensor] = []

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
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
    """Keys and values of the rows that decode, [layers, rows, H, columns, D]; grows when a longer request comes."""

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
    def num_columns(self) -> int:
        return 0 if self.keys is None else self.keys.shape[3]

    # What the model calls while it decodes one token per row.

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
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

    # What the decoder calls between forwards.

    def make_room(self, like: PrefillCache, *, num_rows: int, num_columns: int) -> None:
        """Buffers for this many rows in all of at most this many tokens each, shaped like the prefill's."""
        if self.keys is None:
            shapes = {(k.shape[1::2], v.shape[1::2]) for k, v in zip(like.keys, like.values, strict=True)}
            if len(shapes) != 1:
                raise EngineError("the embedded engine needs a model whose layers have caches of one shape")
            self.keys, self.values = _no_columns(like.keys), _no_columns(like.values)
            self.mask = like.keys[0].new_zeros(0, 1, 1, 0)
        self.widen(num_rows=num_rows, num_columns=num_columns)

    def widen(self, *, num_rows: int, num_columns: int) -> None:
        """Grow what there is, keeping its content; a buffer that is large enough stays as it is."""
        if self.keys is None or self.values is None or self.mask is None:
            return
        old_rows, old_columns = self.mask.shape[0], self.mask.shape[3]
        if old_rows >= num_rows and old_columns >= num_columns:
            return
        rows = max(num_rows, old_rows)
        # Half as much again, so that rows that come and go rarely force the window back to the left.
        columns = num_columns + num_columns // 2 if num_columns > old_columns else old_columns
        self.keys = _grown(self.keys, (1, rows), (3, columns))
        self.values = _grown(self.values, (1, rows), (3, columns))
        self.mask = _grown(self.mask, (0, rows), (3, columns))

    def place(self, prefill: PrefillCache, source: Tensor, length: int) -> None:
        """Append rows: prompts `source` [n] of the prefill, `length` tokens each, ending at the cursor."""
        assert self.keys is not None
        assert self.values is not None
        assert self.mask is not None
        begin, end = self.num_rows, self.num_rows + len(source)
        columns = slice(self.cursor - length, self.cursor)
        for layer, (keys, values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
            self.keys[layer, begin:end, :, columns] = keys[:, :, :length].index_select(0, source)
            self.values[layer, begin:end, :, columns] = values[:, :, :length].index_select(0, source)
        self.mask[begin:end, :, :, : self.cursor - length] = torch.finfo(self.mask.dtype).min / 2
        self.mask[begin:end, :, :, self.cursor - length :] = 0
        self.num_rows = end

    def move_rows(self, targets: Tensor, sources: Tensor, num_rows: int) -> None:
        """Row `sources[i]` replaces row `targets[i]`; then only the first `num_rows` are left."""
        assert self.mask is not None
        if len(targets):
            size = self.cursor - self.first
            for buffer in (self.keys, self.values):
                assert buffer is not None
                window = buffer.narrow(3, self.first, size)
                window.index_copy_(1, targets, window.index_select(1, sources))
            self.mask.index_copy_(0, targets, self.mask.index_select(0, sources))
        self.num_rows = num_rows

    def shift(self, columns: int) -> None:
        """Move the whole window right (or left, when negative)."""
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
        """Forget the rows; the memory stays for the next ones."""
        self.num_rows = self.first = self.cursor = 0

    def free(self) -> None:
        self.clear()
        self.keys = self.values = self.mask = None


def _no_columns(layers: list[Tensor]) -> Tensor:
    _, heads, _, size = layers[0].shape
    return layers[0].new_zeros(len(layers), 0, heads, 0, size)


def _grown(old: Tensor, *sizes: tuple[int, int]) -> Tensor:
    """The same content with larger (dimension, size); zeros elsewhere, because a masked column still takes part in a
    product and must be finite."""
    shape = list(old.shape)
    for dimension, size in sizes:
        shape[dimension] = size
    new = old.new_zeros(shape)
    new[tuple(slice(size) for size in old.shape)] = old
    return new
