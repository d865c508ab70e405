"""A replica puts on each row what the model says of its response tokens, aligned and from the cache where it can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from tqppo.protocols import EngineSpec
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged
from tqppo.rollout.teachers.worker import RowsToScore, ScoredRows, TeacherSpec, TeacherWorker

T = TypeVar("T")
PROMPTS, RESPONSES = (3, 1, 4), (4, 2, 1)


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


@pytest.fixture
def batch(queue: Queue) -> BatchMeta:
    return put_rows(queue)


def put_rows(queue: Queue, seed: int = 0) -> BatchMeta:
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    tokens = torch.randint(0, 250, (sum(lengths),), generator=generator)
    return queue.put([f"{seed}_{i}" for i in range(3)], {"tokens": Jagged(tokens, lengths)})


@pytest.fixture
def spec(tiny_model: Path, tmp_path: Path) -> TeacherSpec:
    engine = EngineSpec(model=str(tiny_model), max_context_tokens=64, name="teacher-math-0", log_dir=str(tmp_path))
    return TeacherSpec("math", "embedded", engine, cache_path=str(tmp_path / "math.sqlite"), cache_bytes=1 << 20)


def with_worker(spec: TeacherSpec, queue: Queue, work: Callable[[TeacherWorker], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        worker = TeacherWorker(spec, queue)
        try:
            return await work(worker)
        finally:
            await worker.close()

    return asyncio.run(run())


def scored(spec: TeacherSpec, queue: Queue, batch: BatchMeta, **call: Any) -> ScoredRows:
    return with_worker(spec, queue, lambda worker: worker.score(RowsToScore(batch, PROMPTS, **call)))


def logprobs_of(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return loaded(input_ids=torch.tensor([list(tokens)])).logits[0].log_softmax(-1)  # [S, V]


def test_the_sampled_tokens_log_probability_stands_one_row_before_the_token(
    spec: TeacherSpec, queue: Queue, batch: BatchMeta, tiny_model: Path
) -> None:
    report = scored(spec, queue, batch)
    assert report == ScoredRows(tokens=sum(PROMPTS) + sum(RESPONSES), cached_rows=0)
    columns = queue.get(batch, ["tokens", "teacher_logprobs"])
    rows = zip(columns["tokens"].unbind(), columns["teacher_logprobs"].unbind(), PROMPTS, strict=True)
    for tokens, found, prompt in rows:
        assert found.shape == (len(tokens), 1)
        expected = logprobs_of(tiny_model, tokens.tolist())[:-1].gather(1, tokens[1:, None])
        torch.testing.assert_close(found[prompt - 1 : -1], expected[prompt - 1 :], atol=1e-5, rtol=0)
        assert not found[: prompt - 1].any()
        assert not found[-1].any()


def test_top_k_and_hidden_states_are_aligned_the_same_way(
    spec: TeacherSpec, queue: Queue, batch: BatchMeta, tiny_model: Path
) -> None:
    scored(replace(spec, top_k=5), queue, batch)
    scored(replace(spec, hidden=True), queue, batch, width=80)
    columns = queue.get(batch, ["tokens", "teacher_ids", "teacher_logprobs", "teacher_hidden"])
    head = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_output_embeddings().weight
    for i, prompt in enumerate(PROMPTS):
        tokens, ids, logprobs, hidden = (columns[name].unbind()[i] for name in columns)
        expected = logprobs_of(tiny_model, tokens.tolist())[prompt - 1 : -1].topk(5)
        assert ids[prompt - 1 : -1].tolist() == expected.indices.tolist()
        torch.testing.assert_close(logprobs[prompt - 1 : -1], expected.values, atol=1e-5, rtol=0)
        assert hidden.shape == (len(tokens), 80)
        assert not hidden[:, head.shape[1] :].any()
        whole = (hidden[prompt - 1 : -1, : head.shape[1]] @ head.T).log_softmax(-1)
        torch.testing.assert_close(whole.topk(5).values, expected.values, atol=1e-5, rtol=0)


def test_hidden_states_of_smaller_types_take_half_the_bytes(spec: TeacherSpec, queue: Queue, batch: BatchMeta) -> None:
    scored(replace(spec, hidden=True), queue, batch)
    exact = queue.get(batch, ["teacher_hidden"])["teacher_hidden"].values()
    scored(replace(spec, hidden=True, hidden_dtype="bfloat16"), queue, batch)
    rounded = queue.get(batch, ["teacher_hidden"])["teacher_hidden"].values()
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_a_prompt_of_its_own_changes_what_the_teacher_says_and_not_where_it_stands(
    spec: TeacherSpec, queue: Queue, batch: BatchMeta, tiny_model: Path
) -> None:
    own = ((9, 8, 7, 6, 5), (4,), (3, 2))
    scored(spec, queue, batch, own_prompts=own)
    columns = queue.get(batch, ["tokens", "teacher_logprobs"])
    rows = zip(columns["tokens"].unbind(), columns["teacher_logprobs"].unbind(), PROMPTS, own, strict=True)
    for tokens, found, prompt, instead in rows:
        response = tokens[prompt:].tolist()
        said = logprobs_of(tiny_model, [*instead, *response])[len(instead) - 1 : -1]
        expected = said.gather(1, torch.tensor(response)[:, None])
        torch.testing.assert_close(found[prompt - 1 : -1], expected, atol=1e-5, rtol=0)
        assert len(found) == len(tokens)


def test_a_batch_scored_before_comes_from_the_cache_with_the_same_bytes(
    spec: TeacherSpec, queue: Queue, batch: BatchMeta
) -> None:
    scored(replace(spec, top_k=4), queue, batch)
    before = queue.get(batch, ["teacher_logprobs"])["teacher_logprobs"].values().clone()
    queue.clear(batch)
    again = put_rows(queue)
    assert scored(replace(spec, top_k=4), queue, again) == ScoredRows(tokens=0, cached_rows=3)
    after = queue.get(again, ["teacher_logprobs"])["teacher_logprobs"].values()
    assert after.numpy().tobytes() == before.numpy().tobytes()
    assert scored(replace(spec, top_k=5), queue, again).cached_rows == 0


def test_a_deterministic_engine_never_computes_a_part_of_a_batch(
    spec: TeacherSpec, queue: Queue, batch: BatchMeta
) -> None:
    scored(spec, queue, batch)
    part = RowsToScore(batch.take([0, 1]), PROMPTS[:2])
    assert with_worker(spec, queue, lambda worker: worker.score(part)).cached_rows == 0


def test_other_engines_are_asked_for_the_missing_rows_only(spec: TeacherSpec, queue: Queue, batch: BatchMeta) -> None:
    timed = replace(spec, engine=replace(spec.engine, deterministic=False))
    with_worker(timed, queue, lambda worker: worker.score(RowsToScore(batch.take([1]), PROMPTS[1:2])))
    report = scored(timed, queue, batch)
    assert report == ScoredRows(tokens=sum(PROMPTS) + sum(RESPONSES) - 3, cached_rows=1)


def test_rows_without_a_response_get_columns_of_zeros(spec: TeacherSpec, queue: Queue) -> None:
    batch = queue.put(["a", "b"], {"tokens": Jagged(torch.tensor([1, 2, 3]), [2, 1])})
    for asked in (spec, replace(spec, top_k=2), replace(spec, hidden=True)):
        call = RowsToScore(batch, (2, 1), width=8)
        assert with_worker(asked, queue, lambda worker, call=call: worker.score(call)) == ScoredRows(0, 0)
    columns = queue.get(batch, ["teacher_ids", "teacher_logprobs", "teacher_hidden"])
    assert [tuple(each.values().shape) for each in columns.values()] == [(3, 2), (3, 2), (3, 8)]
    assert not any(each.values().any() for each in columns.values())


def test_calls_at_the_same_time_do_not_change_each_others_bytes(spec: TeacherSpec, queue: Queue) -> None:
    uncached = replace(spec, cache_bytes=0, top_k=4)
    batches = [put_rows(queue, seed) for seed in range(4)]
    alone = []
    for batch in batches:
        scored(uncached, queue, batch)
        alone.append(queue.get(batch, ["teacher_logprobs"])["teacher_logprobs"].values().clone())

    async def together(worker: TeacherWorker) -> None:
        await asyncio.gather(*(worker.score(RowsToScore(batch, PROMPTS)) for batch in reversed(batches)))

    with_worker(uncached, queue, together)
    for batch, before in zip(batches, alone, strict=True):
        after = queue.get(batch, ["teacher_logprobs"])["teacher_logprobs"].values()
        assert after.numpy().tobytes() == before.numpy().tobytes()


def test_a_ready_replica_says_what_it_is(spec: TeacherSpec, queue: Queue, tmp_path: Path) -> None:
    ready = with_worker(replace(spec, hidden=True), queue, lambda worker: worker.start())
    assert len(ready.fingerprint) == 32
    assert ready.probes[0] == ready.probes[1]
    assert ready.hidden_size > 0
    assert "ready, fingerprint" in (tmp_path / "teacher-math-0.log").read_text()


def test_validation_gets_log_probabilities_of_responses(spec: TeacherSpec, queue: Queue, tiny_model: Path) -> None:
    (found,) = with_worker(spec, queue, lambda worker: worker.logprobs([[5, 6, 7, 8]], [1]))
    said = logprobs_of(tiny_model, [5, 6, 7, 8])
    assert found.tolist() == pytest.approx([float(said[1, 7]), float(said[2, 8])], abs=1e-5)
