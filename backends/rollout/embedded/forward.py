"""Forwards of the embedded engine through the model's own `transformers` class."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tqppo.errors import EngineError

from .kv import DecodeCache, PrefillCache


class ModelForward:
    """Prefills prompts, decodes one token per row, and computes the logits of whole sequences."""

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
        rows = torch.arange(len(last), device=self.device)
        # The hook reduces the head's input to one position per row.
        hook = self._head.register_forward_pre_hook(lambda _, args: (args[0][rows, last][:, None],))
        try:
            logits = self._logits(tokens, past_key_values=cache, use_cache=True)
        finally:
            hook.remove()
        return cache, logits[:, 0]

    def decode(self, tokens: Tensor, cache: DecodeCache, starts: Tensor | None) -> Tensor:
        """Logits [B, V] after one more token [B] of each row; their first tokens are in columns `starts` [B]."""
        if starts is None:  # all rows are equally long
            positions, mask = torch.tensor([[cache.cursor - cache.first]], device=self.device), None
        else:
            positions, mask = (cache.cursor - starts)[:, None], cache.window_mask()
        return self._logits(
            tokens[:, None], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )[:, -1]

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] after every token of sequences [B, T], which are padded on the right."""
        return self._logits(tokens, use_cache=False)

    def _logits(self, tokens: Tensor, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, return_dict=True, **inputs).logits
        return logits
