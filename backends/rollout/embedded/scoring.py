"""Log-probabilities of given sequences by the embedded engine: the hot path of a teacher.

A batch is computed on its own, in forwards whose make-up depends on its sequences alone, so that the same batch gives
the same bytes. Logits exist for one chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tqppo.errors import EngineError
from tqppo.protocols import Scores

from .forward import ModelForward, length_chunks, padded

CPU_TOKENS, GPU_TOKENS = 1024, 16_384  # most tokens of one forward, padding included; more leave a core's cache
HEAD_LOGITS = 2**20  # logits of one chunk, as many as stay in a core's cache
HEAD_ROWS = 256  # fewest rows of a chunk: each reads the whole head
WHOLE_LOGITS = 2**25  # most logits of one forward whose logits cannot be computed in chunks


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """What one call scores: `tokens[i]` from row `starts[i]` on."""

    tokens: Sequence[tuple[int, ...]]
    starts: Sequence[int]
    top_k: int
    hidden: bool

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class RowScores:
    """Results of the rows of one forward, in order: [N], [N, K], [N, K], and [N, H] if asked for."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    hidden: np.ndarray | None

    def placed(self, begin: int, end: int, *, start: int, length: int) -> Scores:
        """The scores of a sequence of `length` tokens, whose rows from `start` on are `begin` to `end` here."""

        def place(rows: np.ndarray) -> np.ndarray:
            result = np.zeros((length, *rows.shape[1:]), rows.dtype)
            result[start : start + end - begin] = rows[begin:end]
            return result

        hidden = None if self.hidden is None else place(self.hidden)
        return Scores(place(self.logprobs), place(self.top_ids), place(self.top_logprobs), hidden)


class SequenceScorer:
    """Synchronous; the engine calls it between steps of the decoder, one batch at a time."""

    def __init__(self, forward: ModelForward) -> None:
        self._forward = forward
        largest = CPU_TOKENS if forward.device.type == "cpu" else GPU_TOKENS
        whole = max(1, WHOLE_LOGITS // forward.vocabulary)
        self._max_tokens = largest if forward.has_plain_head else min(largest, whole)
        self._chunk_rows = max(HEAD_ROWS, HEAD_LOGITS // forward.vocabulary)

    @torch.inference_mode()
    def score(self, batch: ScoreBatch) -> list[Scores]:
        """Equal sequences are computed once. The order of the batch does not change the results."""
        asked = list(zip(batch.tokens, batch.starts, strict=True))
        distinct = sorted(set(asked), key=lambda each: (len(each[0]), each))
        found: dict[tuple[tuple[int, ...], int], Scores] = {}
        for chunk in length_chunks([tokens for tokens, _ in distinct], self._max_tokens):
            pairs, distinct = distinct[: len(chunk)], distinct[len(chunk) :]
            found.update(zip(pairs, self._forward_scores(pairs, batch.top_k, batch.hidden), strict=True))
        return [found[each] for each in asked]

    def _forward_scores(self, pairs: Sequence[tuple[tuple[int, ...], int]], top_k: int, hidden: bool) -> list[Scores]:
        """Scores of sequences that are computed in one forward."""
        tokens = padded([tokens for tokens, _ in pairs], self._forward.device)  # [B, T]
        counts = [len(each) - 1 - start for each, start in pairs]  # the last token has no next one
        begins = [row * tokens.shape[1] + start for row, (_, start) in enumerate(pairs)]
        places = [np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
        results = self._rows(tokens, torch.from_numpy(np.concatenate(places)).to(tokens.device), top_k, hidden)
        return [
            results.placed(end - count, end, start=start, length=len(each))
            for (each, start), count, end in zip(pairs, counts, np.cumsum(counts).tolist(), strict=True)
        ]

    def _rows(self, tokens: Tensor, places: Tensor, top_k: int, with_hidden: bool) -> RowScores:
        """Scores of the rows `places` [N] of sequences [B, T], laid end to end."""
        hidden, logits = self._forward.rows(tokens, places)
        following = tokens.flatten()[places + 1]
        chosen = hidden.new_empty(len(places), dtype=torch.float32)
        ids = hidden.new_empty((len(places), top_k), dtype=torch.int32)
        tops = hidden.new_empty((len(places), top_k), dtype=torch.float32)
        for begin in range(0, len(places), self._chunk_rows):
            part = slice(begin, begin + self._chunk_rows)
            chunk = self._forward.head(hidden[part]) if logits is None else logits[part]
            logprobs = chunk.float().log_softmax(-1)
            chosen[part] = logprobs.gather(1, following[part, None])[:, 0]
            if top_k:
                tops[part], ids[part] = logprobs.topk(top_k, dim=-1)
        if not chosen.isfinite().all():
            raise EngineError("the model's logits are not finite numbers")
        states = hidden.float().cpu().numpy() if with_hidden else None
        return RowScores(chosen.cpu().numpy(), ids.cpu().numpy(), tops.cpu().numpy(), states)
