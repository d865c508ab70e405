"""Sources with weights: their shares, no row twice before its source is used up, the same order again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.data import prompts
from tqppo.data.mixture import Mixture
from tqppo.data.prompts import DataSpec, Sampler
from tqppo.tiny.tokenizer import byte_tokenizer

SPANS = [range(0, 10), range(10, 40)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_each_source_in_its_share_and_every_row_in_turn(shuffle: bool) -> None:
    mixture = Mixture(SPANS, [3, 1], seed=1, shuffle=shuffle)
    assert mixture.shares() == [30, 10]
    places = [tuple(place) for epoch in range(3) for place in mixture.order(epoch).tolist()]
    assert len(set(places)) == len(places) == 120
    assert {index for number, index in places if index >= 10} == set(range(10, 40))  # one pass in three epochs
    assert {number for number, index in places if index < 10} == set(range(9))  # nine passes
    assert (mixture.order(2) == Mixture(SPANS, [3, 1], seed=1, shuffle=shuffle).order(2)).all()


def test_without_shuffling_the_sources_are_spread_evenly() -> None:
    order = Mixture(SPANS, [1, 1], seed=0, shuffle=False).order(0)
    of_first = [int(index) < 10 for _, index in order]
    assert all(sum(of_first[begin : begin + 10]) == 5 for begin in range(0, 40, 10))


def test_a_tiny_weight_still_draws_one_row_per_epoch() -> None:
    assert Mixture(SPANS, [1, 1e6], seed=0, shuffle=True).shares() == [1, 39]


def test_a_sampler_of_weighted_sources_resumes_and_gives_every_prompt_its_own_uid(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 8)):
        rows = "".join(f'{{"prompt": "{name}{i}", "answer": "x"}}\n' for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    spec = DataSpec(train=[f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"], weights=[1, 1])

    def sampler() -> Sampler:
        return Sampler(prompts.load(spec, byte_tokenizer(), seed=3))

    first = sampler()
    batch = first.next_batch(10)
    assert sum(prompt.source == "a" for prompt in batch) == 5
    assert len({prompt.uid for prompt in [*batch, *first.next_batch(7)]}) == 17
    resumed = sampler()
    resumed.restore(first.state())
    assert resumed.next_batch(9) == first.next_batch(9)
