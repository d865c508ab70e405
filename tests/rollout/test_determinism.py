"""Sessions whose tools take a random time give the same rows, to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tqppo.data.prompts import Prompt
from tqppo.protocols import EngineSpec, Sampling
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.session import Session, counter_seed
from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.worker import RolloutSpec, RolloutWorker

Row = tuple[str, list[int], list[float], float, dict[str, object]]


class SlowTools:
    """Sessions of one to four turns, some with a sub-agent, some of which fail once or for good, by their seeds."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self.delay = delay
        self.failed: set[str] = set()

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        draw = counter_seed("slow", *llm.seed_parts) % 100
        context, found = list(prompt.tokens), []
        for turn in range(1 + draw % 4):
            done = await llm.generate(context, max_new_tokens=1 + draw % 7)
            mask = [True] * len(done.tokens)
            found.append(Trajectory(context, done.tokens, mask, done.logprobs, done.finish_reason, done.weight_version))
            await asyncio.sleep(self.delay())
            if draw < 10 or (draw < 30 and llm.name not in self.failed):
                self.failed.add(llm.name)
                raise ConnectionError("the tool's server is down")
            if draw % 5 == 0:
                await llm.child(f"critic{turn}").generate(context[:4])
            context = [*context, *done.tokens, *(counter_seed(turn, token) % 256 for token in done.tokens)]
        return found


@pytest.fixture
def queue() -> Any:
    queue = Queue.create("simple", local=True)
    yield queue
    queue.close()


def rows(queue: Queue, model: Path, delay: Callable[[], float], **changes: Any) -> list[Row]:
    """Sample two steps; returns every row of both, and leaves the queue empty."""
    engine = EngineSpec(str(model), max_context_tokens=128, max_running=6, prefix_cache_bytes=400 << 10)
    spec = RolloutSpec(
        "embedded", engine, str(model), ScorerSpec("exact_match"), max_trajectories=4, session_retries=1, **changes
    )
    worker = RolloutWorker(spec, queue)
    worker.loop = SlowTools(delay)
    prompts = [(i, Prompt(f"p0-0-{i}", i, [65 + i] * (3 + i), "A", "sort", {}, "abc")) for i in range(5)]
    found: list[Row] = []

    async def sample() -> None:
        await worker.start()
        try:
            for step in (1, 2):
                await worker.generate(prompts, Assignment(0, step, group_size=3, sampling=Sampling(max_new_tokens=8)))
                found.extend(taken(queue))
                decoder = worker.engine._decoder  # type: ignore[attr-defined]
                assert len(decoder.kept) == decoder.num_rows == 0
        finally:
            await worker.close()

    asyncio.run(sample())
    return found


def taken(queue: Queue) -> list[Row]:
    """The rows and markers of the queue in their order, which are then cleared."""
    markers = queue.list(where={"is_prompt": True})
    batch = queue.list(where={"is_prompt": None}).in_order()
    columns = queue.get(batch, ["tokens", "rollout_logprobs", "reward"])
    found: list[Row] = [(key, [], [], 0.0, dict(tags)) for key, tags in zip(markers.keys, markers.tags, strict=True)]
    for i, (tokens, logprobs) in enumerate(
        zip(columns["tokens"].unbind(), columns["rollout_logprobs"].unbind(), strict=True)
    ):
        reward = float(columns["reward"][i])
        found.append((batch.keys[i], tokens.tolist(), logprobs.tolist(), reward, dict(batch.tags[i])))
    queue.clear(markers)
    queue.clear(batch)
    return sorted(found, key=lambda row: row[0])


@pytest.mark.parametrize("limit", [0, 4])
def test_random_delays_of_tools_do_not_change_a_bit(queue: Queue, tiny_model: Path, limit: int) -> None:
    """With more sessions than rows, retries, failures, sub-agents, kept caches, and a limit of sessions."""
    rng = random.Random(0)
    quick = rows(queue, tiny_model, lambda: 0.0, max_sessions=limit)
    assert rows(queue, tiny_model, lambda: rng.random() * 0.03, max_sessions=limit) == quick
    statuses = {row[4].get("status") for row in quick}
    assert statuses >= {"finished", "failed"}
    assert any(row[4].get("counts", {}).get("agent/reused_tokens") for row in quick)  # type: ignore[attr-defined]
