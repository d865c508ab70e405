"""Turns of a session compute their new tokens only: exact, within a budget, and gone when the session or weights go."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tqppo import plugins
from tqppo.protocols import Completion, EngineSpec, Request, Sampling, WeightSource
from tqppo.tiny.model import write_tiny_model

prefixes: Any = importlib.import_module("tqppo_backends.rollout.embedded.prefixes")
rows: Any = importlib.import_module("tqppo_backends.rollout.embedded.rows")

MEBIBYTE = 1 << 20
BYTES_PER_TOKEN = 2 * 2 * 64 * 4  # keys and values, layers, hidden size, float32
Dialogue = list[tuple[Request, Completion]]


def drive(folder: Path, work: Callable[[Any], Coroutine[Any, Any, Any]], **fields: Any) -> Any:
    async def run() -> Any:
        spec = EngineSpec(
            str(folder), max_context_tokens=256, prefix_cache_bytes=fields.pop("kept", MEBIBYTE), **fields
        )
        engine = plugins.load("rollout", "embedded")(spec)
        await engine.start()
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(run())


async def talk(engine: Any, number: int, *, turns: int = 4, delay: Callable[[], float] = lambda: 0.0) -> Dialogue:
    """A session whose turns each add an observation of some tokens, after some delay."""
    rng = random.Random(number)
    context = [rng.randrange(256) for _ in range(rng.randrange(5, 40))]
    found: Dialogue = []
    for turn in range(turns):
        name = f"s{number}"
        sampling = Sampling(max_new_tokens=rng.randrange(1, 12))
        asked = Request(tuple(context), sampling, 1000 * number + turn, f"{name}-{turn}", (number, turn), name)
        completion = await engine.generate(asked)
        found.append((asked, completion))
        context += [*completion.tokens, *(rng.randrange(256) for _ in range(rng.randrange(1, 12)))]
        await asyncio.sleep(delay())
    return found


async def together(
    engine: Any, count: int, delay: Callable[[], float] = lambda: 0.0, turns: Callable[[int], int] = lambda number: 4
) -> list[Dialogue]:
    """Sessions that are announced together; each ends after its last turn."""

    async def session(number: int) -> Dialogue:
        try:
            return await talk(engine, number, turns=turns(number), delay=delay)
        finally:
            engine.end_session(f"s{number}")

    engine.expect([f"s{number}" for number in range(count)], "step")
    return list(await asyncio.gather(*map(session, range(count))))


async def idle(engine: Any) -> None:
    """Wait until the engine has nothing to do."""
    while engine._work is not None:
        await asyncio.sleep(0)


def assert_exact(folder: Path, dialogues: list[Dialogue]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for asked, got in (turn for dialogue in dialogues for turn in dialogue):
        with torch.no_grad():
            logits = model(torch.tensor([[*asked.tokens, *got.tokens]])).logits[0, len(asked.tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "olmo2"])
def test_every_family_continues_its_sessions_exactly(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family=family)
    dialogues = drive(folder, lambda engine: together(engine, 6))
    assert_exact(folder, dialogues)
    assert all(got.reused_tokens > 0 for dialogue in dialogues for _, got in dialogue[1:])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_continues_sessions_exactly(tiny_model: Path, attention: str) -> None:
    assert_exact(tiny_model, drive(tiny_model, lambda engine: together(engine, 6), attention=attention))


def test_a_turn_computes_only_what_its_session_has_not_computed(tiny_model: Path) -> None:
    async def work(engine: Any) -> tuple[Dialogue, int]:
        dialogue = await talk(engine, 1)
        return dialogue, engine._decoder.num_prefilled

    dialogue, num_prefilled = drive(tiny_model, work)
    whole = sum(len(asked.tokens) for asked, _ in dialogue)
    for (before, said), (asked, got) in itertools.pairwise(dialogue):
        assert got.reused_tokens == len(before.tokens) + len(said.tokens) - 1
        assert got.reused_tokens < len(asked.tokens)
    assert num_prefilled == whole - sum(got.reused_tokens for _, got in dialogue)
    without, num_computed = drive(tiny_model, work, kept=0)
    assert num_computed == whole
    assert [got.tokens for _, got in without] == [got.tokens for _, got in dialogue]


def test_a_context_that_was_rewritten_reuses_what_is_left_of_its_beginning(tiny_model: Path) -> None:
    async def work(engine: Any) -> list[Dialogue]:
        first = Request([1, 2, 3, 4, 5], Sampling(max_new_tokens=4), 0, "a", session="s")
        second = Request([1, 2, 3, 9, 9, 9], Sampling(max_new_tokens=4), 1, "b", session="s")
        return [[(first, await engine.generate(first)), (second, await engine.generate(second))]]

    ((_, (_, got)),) = dialogues = drive(tiny_model, work)
    assert got.reused_tokens == 3
    assert_exact(tiny_model, dialogues)


def test_late_tools_do_not_change_a_byte(tiny_model: Path) -> None:
    """More sessions than rows, of different lengths, and caches that are evicted on the way."""
    rng = random.Random(4)
    budget = 250 * BYTES_PER_TOKEN

    def played(delay: Callable[[], float]) -> list[Dialogue]:
        work = lambda engine: together(engine, 14, delay, lambda number: 1 + number % 4)  # noqa: E731
        return drive(tiny_model, work, max_running=5, kept=budget)

    quick = played(lambda: 0.0)
    assert [played(lambda: rng.random() * 0.02) for _ in range(2)] == [quick] * 2
    reused = [got.reused_tokens > 0 for dialogue in quick for _, got in dialogue[1:]]
    assert any(reused)
    assert not all(reused), "the budget is too large to evict anything"


def test_kept_caches_stay_within_their_budget_and_the_oldest_goes_first() -> None:
    kept = prefixes.KeptPrefixes(2000, at_once=True)
    cache = torch.zeros(2, 2, 10, 5)  # 800 bytes
    for name in "abc":
        kept.keep(name, tuple(range(10)), cache, cache[:, :, :, :1])
        assert kept.num_bytes <= 2000
    ticket = rows.Ticket(tuple(range(11)), Sampling(), 0, 1)
    assert kept.take(replace(ticket, session="a")) is None
    assert kept.take(replace(ticket, session="b"))[1] == 10
    assert kept.take(replace(ticket, session="b")) is None, "a cache is used once: the turn leaves a newer one"
    assert kept.num_bytes == 960
    kept.keep("large", tuple(range(10)), torch.zeros(2, 2, 10, 100), cache)
    assert len(kept) == kept.num_bytes == 0


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("end", ["session", "weights", "sleep", "failure"])
def test_a_cache_is_released_with_its_session_weights_or_engine(
    tiny_model: Path, end: str, deterministic: bool
) -> None:
    async def work(engine: Any) -> None:
        await talk(engine, 1, turns=2)
        await talk(engine, 2, turns=1)
        assert len(engine._decoder.kept) == 2
        if end == "session":
            engine.end_session("s1")
            engine.end_session("s2")
        elif end == "weights":
            await engine.load_weights(WeightSource(str(tiny_model), 3))
        elif end == "sleep":
            await engine.sleep()
        else:
            engine._decoder.reset()
        await idle(engine)
        assert len(engine._decoder.kept) == engine._decoder.kept.num_bytes == 0

    drive(tiny_model, work, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_session_that_is_cancelled_while_it_decodes_leaves_nothing(tiny_model: Path, deterministic: bool) -> None:
    async def work(engine: Any) -> None:
        await talk(engine, 1, turns=1)
        asked = Request([5, 6], Sampling(temperature=0, max_new_tokens=200), 0, "long", session="s1")
        task = asyncio.ensure_future(engine.generate(asked))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine._decoder.num_rows == 1
        task.cancel()
        engine.end_session("s1")
        await asyncio.wait({task})
        await talk(engine, 2, turns=1)  # the engine has gone on since
        assert engine._decoder.num_rows == 0
        assert len(engine._decoder.kept) == 1

    drive(tiny_model, work, deterministic=deterministic)


def test_sub_agents_keep_caches_of_their_own_that_end_with_the_session(tiny_model: Path) -> None:
    async def work(engine: Any) -> None:
        for name in ("s", "s/reviewer", "t"):
            await engine.generate(Request([1, 2, 3], Sampling(max_new_tokens=2), 0, name, session=name))
        assert len(engine._decoder.kept) == 3
        engine.end_session("s")
        await idle(engine)
        assert len(engine._decoder.kept) == 1

    drive(tiny_model, work)
