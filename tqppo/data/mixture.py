"""The order of rows from several sources with weights: a function of seed and epoch, so that runs resume exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RowOrder = np.ndarray  # [N, 2]: the pass over its source, and the index of the row


def shuffled(size: int, seed: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(list(seed)).permutation(size)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws from each source its share of every epoch. A source continues in the next epoch where it stopped.

    An epoch has as many rows as all sources together. A row is drawn again only when its source has been used up, so
    that (pass, index) never occurs twice.
    """

    spans: Sequence[range]  # the indexes of each source's rows
    weights: Sequence[float]
    seed: int
    shuffle: bool

    def shares(self) -> list[int]:
        """Rows of each source in an epoch: in proportion to the weights, at least one, by the largest remainders."""
        total, weight = sum(map(len, self.spans)), sum(self.weights)
        exact = [total * each / weight for each in self.weights]
        counts = [max(1, int(each)) for each in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i])
        for i in by_remainder[: max(0, total - sum(counts))]:
            counts[i] += 1
        return counts

    def order(self, epoch: int) -> RowOrder:
        counts = self.shares()
        parts = [self._drawn(source, epoch * count, count) for source, count in enumerate(counts)]
        places = np.concatenate(parts)
        if self.shuffle:
            return np.asarray(places[shuffled(len(places), [self.seed, epoch])])
        when = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        return np.asarray(places[np.argsort(when, kind="stable")])  # spread evenly over the epoch

    def _drawn(self, source: int, begin: int, count: int) -> RowOrder:
        """`count` rows of a source, from the place `begin` of its endless passes on."""
        span = self.spans[source]
        numbers = np.arange(begin, begin + count)
        passes, inside = numbers // len(span), numbers % len(span)
        indexes = np.empty(count, dtype=np.int64)
        for each in np.unique(passes):
            chosen = passes == each
            order = self._pass(source, int(each))
            indexes[chosen] = span.start + order[inside[chosen]]
        return np.stack([passes, indexes], axis=1)

    def _pass(self, source: int, number: int) -> np.ndarray:
        size = len(self.spans[source])
        return shuffled(size, [self.seed, number, source + 1]) if self.shuffle else np.arange(size)
