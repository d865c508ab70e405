"""The pool with real Ray actors and the embedded engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from tqppo.data.prompts import Prompt
from tqppo.devices.seats import NO_CPU
from tqppo.errors import DeadlineExceeded, EngineError
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.protocols import Completion, EngineSpec, Request, Sampling, WeightSource
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.loops.base import load_loop
from tqppo.rollout.pool import RolloutPool, is_local
from tqppo.rollout.session import Session
from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.worker import RolloutSpec, RolloutWorker
from tqppo.weights.verify import Probe

TOKENS = [1, 2, 3, 4]


def prompts(count: int) -> list[tuple[int, Prompt]]:
    return [(i, Prompt(f"p0-0-{i}", i, [1, 2, 3], "A", "sort", {}, "abc")) for i in range(count)]


def task(max_new_tokens: int = 4) -> Assignment:
    return Assignment(seed=0, step=1, group_size=2, sampling=Sampling(max_new_tokens=max_new_tokens))


@pytest.fixture(scope="module")
def queue(local_ray: None) -> Iterator[Queue]:
    made = Queue.create("simple", budget_bytes=16 << 20)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool(queue: Queue, tiny_model: Path) -> Iterator[RolloutPool]:
    engine = EngineSpec(model=str(tiny_model), max_context_tokens=64)
    spec = RolloutSpec("embedded", engine, str(tiny_model), ScorerSpec(function="exact_match"))
    made = RolloutPool(spec, queue, endpoints=[], replicas=2, timeout_s=120)
    made.start(RayLauncher(), [NO_CPU] * 2)
    made.ready()
    yield made
    made.close()


def test_every_prompt_is_sampled_once_over_the_replicas(pool: RolloutPool, queue: Queue) -> None:
    pool.generate(prompts(3), task())
    markers = queue.list(where={"is_prompt": True})
    assert sorted(markers.keys) == ["p0-0-0", "p0-0-1", "p0-0-2"]
    queue.clear(markers)
    rows = queue.list()
    assert sorted(rows.keys) == sorted(f"p0-0-{i}_{session}_0" for i in range(3) for session in range(2))
    queue.clear(rows)


def record_sessions(worker: RolloutWorker) -> None:
    """Have sessions ask three times, and write down which of them ask this engine. Runs on the worker."""
    generate, asked = worker.engine.generate, []

    async def recorded(request: Request) -> Completion:
        asked.append(request.session)
        return await generate(request)

    class ThreeTurns:
        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            context = list(prompt.tokens)
            for _ in range(3):
                done = await llm.generate(context)
                context += done.tokens
            return [Trajectory(prompt.tokens, done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 0)]

    worker.loop, worker.asked = ThreeTurns(), asked  # type: ignore[attr-defined]
    worker.engine.generate = recorded  # type: ignore[method-assign]


def forget_sessions(worker: RolloutWorker) -> list[str]:
    """Undo `record_sessions`; returns who asked."""
    del worker.engine.generate
    worker.loop = load_loop("single_turn", {})
    return worker.asked  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("deterministic", [True, False])
def test_all_turns_of_a_session_go_to_one_replica(pool: RolloutPool, queue: Queue, deterministic: bool) -> None:
    """In turn, and by load with room for one group at a time."""
    specs = pool.specs
    engine = replace(specs[0].engine, deterministic=deterministic, max_running=2)
    pool.specs = [replace(specs[0], engine=engine)] * 2
    ray.get([worker.actor.__ray_call__.remote(record_sessions) for worker in pool.workers])
    try:
        pool.generate(prompts(5), task())
    finally:
        pool.specs = specs
        asked = ray.get([worker.actor.__ray_call__.remote(forget_sessions) for worker in pool.workers])
    assert not set(asked[0]) & set(asked[1])
    assert sorted(Counter(asked[0] + asked[1]).values()) == [3] * 10
    assert all(asked)
    if deterministic:
        assert [len(set(each)) for each in asked] == [6, 4]
    queue.clear(queue.list())


def test_engines_sleep_and_wake_as_far_as_the_next_call_needs(
    pool: RolloutPool, queue: Queue, tiny_model: Path
) -> None:
    assert pool.held_bytes() > 0
    pool.shared_engines.rest()
    assert pool.held_bytes() == 0
    pool.load_weights(WeightSource(str(tiny_model), 1))
    assert pool.shared_engines.awake == {"weights"}
    pool.generate(prompts(1), task())
    assert pool.shared_engines.awake == {"weights", "cache"}
    queue.clear(queue.list(where={"is_prompt": True}))
    queue.clear(queue.list())


def test_weights_that_are_not_the_trainer_s_are_noticed(pool: RolloutPool, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    expected = logprobs[range(3), TOKENS[1:]].tolist()
    pool.load_weights(WeightSource(str(tiny_model), 1), Probe(TOKENS, expected, 1e-4))
    with pytest.raises(EngineError, match="does not run the new weights"):
        pool.load_weights(WeightSource(str(tiny_model), 2), Probe(TOKENS, [0.0, 0.0, 0.0], 1e-4))


def test_at_the_deadline_the_missing_prompts_are_named(pool: RolloutPool, queue: Queue) -> None:
    pool.timeout_s = 0.0
    ray.get([worker.actor.__ray_call__.remote(sleep_in_sessions) for worker in pool.workers])
    try:
        with pytest.raises(DeadlineExceeded, match=r"1 of 1 prompts are missing: p0-0-0\. Raise rollout.timeout_s"):
            pool.generate(prompts(1), task(max_new_tokens=40))
    finally:
        pool.timeout_s = 120
    deadline = time.monotonic() + 30
    while not all(ray.get([worker.actor.__ray_call__.remote(all_ended) for worker in pool.workers])):
        assert time.monotonic() < deadline, "the sessions of a step that was given up go on"
    ray.get([worker.actor.__ray_call__.remote(play_again) for worker in pool.workers])
    assert not queue.list().keys


def sleep_in_sessions(worker: RolloutWorker) -> None:
    """Have sessions ask once and sleep until they are cancelled. Runs on the worker."""

    class Asleep:
        under_way = 0

        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            self.under_way += 1
            try:
                await llm.generate(prompt.tokens)
                await asyncio.sleep(60)
            finally:
                self.under_way -= 1
            return []

    worker.loop = Asleep()


def all_ended(worker: RolloutWorker) -> bool:
    return not worker.loop.under_way and not num_under_way(worker)  # type: ignore[attr-defined]


def play_again(worker: RolloutWorker) -> None:
    worker.loop = load_loop("single_turn", {})


def num_under_way(worker: RolloutWorker) -> int:
    """Rows that decode, requests that wait and caches that are kept. Runs on the worker."""
    engine: Any = worker.engine
    return engine._decoder.num_rows + len(engine._pending._by_id) + len(engine._decoder.kept)


def test_a_dead_replica_is_an_engine_error(queue: Queue, tiny_model: Path) -> None:
    engine = EngineSpec(model=str(tiny_model), max_context_tokens=64)
    spec = RolloutSpec("embedded", engine, str(tiny_model), ScorerSpec(function="exact_match"))
    pool = RolloutPool(spec, queue, endpoints=[], replicas=1, timeout_s=60)
    pool.start(RayLauncher(), [NO_CPU])
    pool.ready()
    pool.workers[0].kill()
    with pytest.raises(EngineError, match="the rollout: the process died"):
        pool.generate(prompts(1), task())
    pool.close()


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [("", True), ("http://localhost:8000", True), ("http://127.0.0.1:1", True), ("http://node1:8000", False)],
)
def test_only_servers_on_this_node_can_read_its_files(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local
