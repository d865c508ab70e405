"""Forwards of the embedded engine through the model's own `transformers` class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tqppo.errors import EngineError

from .kv import DecodeCache, PrefillCache
from .prefixes import ContinuedCache

PADDING_PER_FORWARD = 256  # padding tokens that cost about as much as one more forward


class ModelForward:
    """Prefills prompts, decodes one token per row, and computes chosen rows of whole sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: torch.nn.Module = model
        self.device: torch.device = next(model.parameters()).device
        self.vocabulary: int = model.config.get_text_config().vocab_size
        head: torch.nn.Module | None = cast(Any, model).get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(model).__name__} has no output embeddings; the embedded engine needs them")
        self._head = head

    def prefill(self, tokens: Tensor, last: Tensor) -> tuple[PrefillCache, Tensor]:
        """Caches of prompts [U, T], and the logits [U, V] after each prompt's last token, which is at `last` [U].

        Padding is on the right, where causal attention never sees it, so no mask is needed.
        """
        cache = PrefillCache()
        return cache, self._last_logits(tokens, last, past_key_values=cache, use_cache=True)

    def extend(self, tokens: Tensor, last: Tensor, cache: ContinuedCache) -> Tensor:
        """Logits [U, V] after the last of new tokens [U, T] of sequences whose beginnings are in the cache."""
        return self._last_logits(
            tokens,
            last,
            attention_mask=cache.mask(),
            position_ids=cache.positions(),
            past_key_values=cache,
            use_cache=True,
        )

    def decode(self, tokens: Tensor, cache: DecodeCache, starts: Tensor | None) -> Tensor:
        """Logits [B, V] after one more token [B] of each row; their first tokens are in columns `starts` [B]."""
        if starts is None:  # all rows are equally long
            positions, mask = torch.tensor([[cache.cursor - cache.first]], device=self.device), None
        else:
            positions, mask = (cache.cursor - starts)[:, None], cache.window_mask()
        return self._logits(
            tokens[:, None], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )[:, -1]

    def rows(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """The head's inputs [N, H] at `places` [N] of sequences [B, T], laid end to end and padded on the right.

        The second result is their logits [N, V] if the architecture changes them after its head; otherwise `head`
        computes them, a chunk at a time.
        """
        found: list[Tensor] = []

        def select(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            found.append(args[0].flatten(0, 1).index_select(0, places))
            return (args[0][:1, :1] if self.has_plain_head else found[0][None],)

        with self._head.register_forward_pre_hook(select):
            logits = self._logits(tokens, use_cache=False)
        return found[0], None if self.has_plain_head else logits[0]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of the head's inputs [N, H]."""
        logits: Tensor = self._head(hidden)
        return logits

    @cached_property
    def has_plain_head(self) -> bool:
        """Whether the head's outputs are the logits, as they are without scaling and capping."""
        outputs: list[Tensor] = []
        tokens = torch.arange(3, device=self.device)[None] % self.vocabulary
        with self._head.register_forward_hook(lambda _, __, output: outputs.append(output)):
            logits = self._logits(tokens, use_cache=False)
        return torch.equal(logits.float(), outputs[0].float())

    def _last_logits(self, tokens: Tensor, last: Tensor, **inputs: Any) -> Tensor:
        """Logits [U, V] at one place per row, `last` [U]; the hook reduces the head's input to it."""
        rows = torch.arange(len(last), device=self.device)
        with self._head.register_forward_pre_hook(lambda _, args: (args[0][rows, last][:, None],)):
            return self._logits(tokens, **inputs)[:, 0]

    def _logits(self, tokens: Tensor, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, return_dict=True, **inputs).logits
        return logits


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [B, T], padded on the right with 0."""
    longest = max(len(sequence) for sequence in sequences)
    if all(len(sequence) == longest for sequence in sequences):
        return torch.tensor(sequences, device=device)
    return torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences], device=device)


def length_chunks(sequences: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Cut sequences sorted by length into forwards that stay within the budget and have little padding."""
    chunk: list[tuple[int, ...]] = []
    real = 0
    for sequence in sequences:
        size = (len(chunk) + 1) * len(sequence)
        padding = size - real - len(sequence)
        if chunk and (size > max_tokens or (padding > PADDING_PER_FORWARD and padding > size // 4)):
            yield chunk
            chunk, real = [], 0
        chunk.append(sequence)
        real += len(sequence)
    if chunk:
        yield chunk
