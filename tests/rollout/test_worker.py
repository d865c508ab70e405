"""Sessions become rows: keys, tags, columns, markers; failures are marked, never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tqppo.data.prompts import Prompt
from tqppo.errors import DataError, EngineError
from tqppo.protocols import Completion, EngineCapabilities, EngineSpec, Request, Sampling
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout import worker as worker_module
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.loops.base import AgentLoop
from tqppo.rollout.session import Session, counter_seed
from tqppo.rollout.template import ChatTemplate
from tqppo.rollout.trajectory import Trajectory
from tqppo.rollout.worker import RolloutSpec, RolloutWorker


class CountingEngine:
    """Answers with as many tokens as the seed says, and keeps the sessions that it was told of."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(deterministic=True)

    def __init__(self, spec: EngineSpec) -> None:
        self.announced: list[str] = []
        self.ended: list[str] = []
        self.requests: list[Request] = []

    async def start(self) -> None: ...

    def expect(self, sessions: Sequence[str], batch: str = "") -> None:
        self.announced += sessions

    def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        length = 1 + request.seed % 3
        return Completion([65 + request.seed % 20] * length, [-0.5] * length, "stop", 7)

    async def close(self) -> None: ...


@pytest.fixture
def queue() -> Any:
    queue = Queue.create("simple", local=True)
    yield queue
    queue.close()


@pytest.fixture
def make_worker(queue: Queue, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker_module.plugins, "load", lambda kind, name: CountingEngine)

    def make(loop: Any = None, **changes: Any) -> RolloutWorker:
        spec = RolloutSpec(
            backend="counting",
            engine=EngineSpec(model=str(tiny_model), max_context_tokens=64),
            tokenizer=str(tiny_model),
            reward=ScorerSpec(**changes.pop("reward", {"function": "exact_match"})),
            **changes,
        )
        made = RolloutWorker(spec, queue)
        if loop is not None:
            made.loop = loop
        return made

    return make


def prompts(count: int) -> list[tuple[int, Prompt]]:
    return [(i, Prompt(f"p0-0-{i}", i, [1, 2, 3], "A", "sort", {}, "abc")) for i in range(count)]


def sample(worker: RolloutWorker, count: int = 3, **task: Any) -> None:
    settings = {"seed": 0, "step": 1, "group_size": 2, "sampling": Sampling(max_new_tokens=4), **task}

    async def run() -> None:
        await worker.start()
        try:
            await worker.generate(prompts(count), Assignment(**settings))
        finally:
            await worker.close()

    asyncio.run(run())


def markers(queue: Queue, partition: str = "train") -> dict[str, dict[str, Any]]:
    found = queue.list(partition, where={"is_prompt": True})
    return {key: dict(tags) for key, tags in zip(found.keys, found.tags, strict=True)}


def test_every_session_is_a_row_and_every_prompt_a_marker(queue: Queue, make_worker: Any) -> None:
    worker = make_worker()
    sample(worker)
    assert {tags["status"] for tags in markers(queue).values()} == {"finished"}
    queue.clear(queue.list(where={"is_prompt": True}))
    rows = queue.list().in_order()
    assert rows.keys == tuple(f"p0-0-{i}_{s}_0" for i in range(3) for s in range(2))
    columns = queue.get(rows, ["tokens", "response_mask", "rollout_logprobs", "reward"])
    lengths = [tags["response_len"] for tags in rows.tags]
    assert [len(row) for row in columns["rollout_logprobs"].unbind()] == lengths
    assert [len(row) for row in columns["tokens"].unbind()] == [3 + length for length in lengths]
    assert columns["reward"].tolist() == [tags["reward"] for tags in rows.tags]
    assert all(tags["weight_version"] == 7 for tags in rows.tags)
    assert worker.engine.announced == [request.session for request in worker.engine.requests]
    assert sorted(worker.engine.ended) == sorted(worker.engine.announced)


def test_seeds_depend_on_step_prompt_session_and_turn_only(make_worker: Any, queue: Queue) -> None:
    worker = make_worker()
    sample(worker, 1, step=4)
    assert [request.seed for request in worker.engine.requests] == [
        counter_seed(0, "train", 4, "p0-0-0", session, 0) for session in range(2)
    ]
    assert len({counter_seed(0, "train", step, uid, s, 0) for step in (1, 2) for uid in "ab" for s in (0, 1)}) == 8


def test_a_failed_session_marks_its_group_and_the_others_stay(queue: Queue, make_worker: Any) -> None:
    class FailsOnce:
        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            if prompt.index == 1 and llm.order[1] == 0:
                raise RuntimeError("tool server is down")
            done = await llm.generate(prompt.tokens)
            return [Trajectory(prompt.tokens, done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 7)]

    worker = make_worker(FailsOnce())
    sample(worker)
    found = markers(queue)
    assert [found[f"p0-0-{i}"]["status"] for i in range(3)] == ["finished", "failed", "finished"]
    assert "tool server is down" in found["p0-0-1"]["error"]
    assert found["p0-0-1"]["rows"] == 1
    assert len(worker.engine.requests) == 5
    assert sorted(worker.engine.ended) == sorted(worker.engine.announced), "the session that never asked ended, too"


class FailsAtFirst:
    """Each session fails this many times, after its first turn, before it answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts: dict[tuple[int, ...], int] = {}

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        done = await llm.generate(prompt.tokens)
        self.attempts[llm.order] = self.attempts.get(llm.order, 0) + 1
        if self.attempts[llm.order] <= self.failures:
            raise RuntimeError("tool server is down")
        return [Trajectory(prompt.tokens, done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 7)]


def test_a_retried_session_is_the_one_that_it_would_have_been(queue: Queue, make_worker: Any) -> None:
    def tokens(worker: RolloutWorker) -> list[list[int]]:
        sample(worker, 2)
        marked = markers(queue)
        assert {tags["status"] for tags in marked.values()} == {"finished"}
        retried.append(sum(tags["retries"] for tags in marked.values()))
        queue.clear(queue.list(where={"is_prompt": True}))
        rows = queue.list().in_order()
        found = [row.tolist() for row in queue.get(rows, ["tokens"])["tokens"].unbind()]
        queue.clear(rows)
        return found

    retried: list[int] = []
    worker = make_worker(FailsAtFirst(2), session_retries=2)
    assert tokens(worker) == tokens(make_worker())
    assert retried == [8, 0]
    assert len(worker.engine.requests) == 12
    assert len(worker.engine.announced) == len(worker.engine.ended) == 4
    assert len({request.request_id for request in worker.engine.requests}) == 12, "an abandoned request keeps its name"


def test_a_session_that_fails_more_often_than_it_is_retried_fails_its_group(queue: Queue, make_worker: Any) -> None:
    sample(make_worker(FailsAtFirst(2), session_retries=1), 1)
    (marker,) = markers(queue).values()
    assert (marker["status"], marker["failed_sessions"], marker["retries"], marker["rows"]) == ("failed", 2, 2, 0)


def test_when_the_engine_fails_the_other_sessions_end_with_their_requests(queue: Queue, make_worker: Any) -> None:
    class FailsLater:
        cancelled = 0

        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            await llm.generate(prompt.tokens)
            if prompt.index == 1 and llm.order[1] == 0:
                raise EngineError("the server is gone")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return []

    worker = make_worker(loop := FailsLater())
    with pytest.raises(EngineError, match="the server is gone"):
        sample(worker)
    assert loop.cancelled == 5
    assert sorted(worker.engine.ended) == sorted(worker.engine.announced)


def test_no_more_sessions_play_at_a_time_than_allowed(queue: Queue, make_worker: Any) -> None:
    class Counts:
        playing = most = 0

        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            self.playing += 1
            self.most = max(self.most, self.playing)
            done = await llm.generate(prompt.tokens)
            self.playing -= 1
            return [Trajectory(prompt.tokens, done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 7)]

    sample(make_worker(loop := Counts(), max_sessions=4))
    assert loop.most == 4
    assert len(queue.list(where={"is_prompt": None}).keys) == 6


def test_all_trajectories_of_a_session_carry_its_final_reward(queue: Queue, make_worker: Any) -> None:
    class Rewrites:
        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            first = await llm.generate(prompt.tokens)
            second = await llm.generate([9])
            return [
                Trajectory(tokens, done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 7)
                for tokens, done in (([1, 2, 3], first), ([9], second))
            ]

    sample(make_worker(Rewrites(), max_trajectories=2), 1)
    rows = queue.list(where={"is_prompt": None}).in_order()
    assert [(tags["session"], tags["trajectory"]) for tags in rows.tags] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    rewards = [tags["reward"] for tags in rows.tags]
    assert rewards[0] == rewards[1]
    assert rewards[2] == rewards[3]


class Credits:
    """Two trajectories a session: the first has a reward of its own, the last one only where the test says so."""

    def __init__(self, last: float | None = None) -> None:
        self.last = last

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        done = await llm.generate(prompt.tokens)
        mask = [True] * len(done.tokens)
        given = {"turn_ends": [len(mask)], "turn_rewards": [0.5], "anchors": ["start"]}
        return [
            Trajectory([1], done.tokens, mask, done.logprobs, "stop", 7, reward=0.25, **given),
            Trajectory([2], done.tokens, mask, done.logprobs, "stop", 7, reward=self.last),
        ]


def test_a_trajectory_keeps_the_reward_that_its_loop_gave_it(queue: Queue, make_worker: Any) -> None:
    sample(make_worker(Credits(last=2.0), max_trajectories=2), 1)
    rows = queue.list(where={"is_prompt": None}).in_order()
    assert queue.get(rows, ["reward"])["reward"].tolist() == [0.25, 2.0, 0.25, 2.0]
    assert [tags["reward"] for tags in rows.tags] == [0.25, 2.0, 0.25, 2.0]
    assert "turn_ends" not in rows.columns


def test_a_reward_of_a_loop_that_cannot_be_trained_on_fails_its_session(queue: Queue, make_worker: Any) -> None:
    sample(make_worker(Credits(last=1e308), max_trajectories=2), 1)
    assert "trajectory 1: the agent loop's reward is 1e+308" in markers(queue)["p0-0-0"]["error"]


def test_turns_are_columns_where_the_task_asks_for_them(queue: Queue, make_worker: Any) -> None:
    sample(make_worker(Credits(last=2.0), max_trajectories=2), 1, turns=True)
    rows = queue.list(where={"is_prompt": None}).in_order()
    columns = queue.get(rows, ["turn_ends", "turn_rewards", "turn_anchors"])
    assert columns["turn_rewards"].values().tolist() == [0.5, 2.0] * 2
    assert columns["turn_ends"].values().tolist() == [tags["response_len"] for tags in rows.tags]


def test_more_trajectories_than_allowed_fail_the_session(queue: Queue, make_worker: Any) -> None:
    class TooMany:
        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            done = await llm.generate(prompt.tokens)
            return [Trajectory([1], done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 7)] * 2

    sample(make_worker(TooMany()), 1)
    assert "rollout.max_trajectories is 1" in markers(queue)["p0-0-0"]["error"]


def test_the_greedy_baseline_gives_its_reward_and_no_row(queue: Queue, make_worker: Any) -> None:
    worker = make_worker()
    sample(worker, 2, greedy=True)
    queue.clear(queue.list(where={"is_prompt": True}))
    rows = queue.list()
    assert len(rows) == 4
    assert "baseline_reward" in rows.columns
    assert sum(request.sampling.temperature == 0 for request in worker.engine.requests) == 2


def test_validation_leaves_tags_only_with_the_greedy_answer_last(queue: Queue, make_worker: Any) -> None:
    sample(make_worker(), 2, greedy=True, keep_tensors=False, partition="val")
    rows = queue.list("val", where={"is_prompt": None}).in_order()
    assert [tags["session"] for tags in rows.tags] == [0, 1, 2, 0, 1, 2]
    assert rows.columns == ()
    assert all(tags["last"] and "answer" in tags for tags in rows.tags)


FAILING = "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    raise ValueError('no')\n"


@pytest.mark.parametrize(("policy", "status"), [("zero", "finished"), ("drop_group", "dropped")])
def test_a_failing_reward_follows_its_policy(
    queue: Queue, make_worker: Any, tmp_path: Path, policy: str, status: str
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(FAILING)
    sample(make_worker(reward={"function": f"{path}:reward", "on_error": policy}), 1)
    assert markers(queue)["p0-0-0"]["status"] == status


def test_a_failing_reward_ends_the_run_where_that_is_the_policy(make_worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(FAILING)
    with pytest.raises(DataError, match="ValueError: no"):
        sample(make_worker(reward={"function": f"{path}:reward", "on_error": "error"}), 1)


def test_groups_that_finish_together_share_a_put(
    queue: Queue, make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[int] = []
    put = queue.aio.put

    async def counted(keys: Any, *args: Any, **kwargs: Any) -> Any:
        puts.append(len(keys))
        return await put(keys, *args, **kwargs)

    monkeypatch.setattr(queue.aio, "put", counted)
    monkeypatch.setattr("tqppo.rollout.writer.GATHER_S", 60.0)  # longer than sampling takes on any machine
    sample(make_worker(), 5)
    assert puts == [10]


def test_a_put_that_fails_ends_the_rollout(queue: Queue, make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OneLater:
        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            done = await llm.generate(prompt.tokens)
            if prompt.index:
                await failed.wait()
            return [Trajectory(prompt.tokens, done.tokens, [True] * len(done.tokens), done.logprobs, "stop", 7)]

    failed = asyncio.Event()

    async def full(*args: Any, **kwargs: Any) -> Any:
        failed.set()
        raise DataError("no room")

    monkeypatch.setattr(queue.aio, "put", full)
    monkeypatch.setattr("tqppo.rollout.writer.GATHER_S", 0.0)
    with pytest.raises(DataError, match="no room"):
        sample(make_worker(OneLater()), 2)


class Counts(AgentLoop):
    """Calls a tool, gives its own reward, and once trains on what was not sampled."""

    def __init__(self) -> None:
        self.life: list[str] = []

    async def start(self, chat: ChatTemplate) -> None:
        self.life.append(chat.decode(chat.encode("started")))

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        done = await llm.generate(prompt.tokens)
        llm.count("tool/search/calls", 2)
        tokens = [*done.tokens, 3] if prompt.index == 1 else done.tokens
        size = len(tokens)
        found = Trajectory(prompt.tokens, tokens, [True] * size, [-0.5] * size, "stop", 7)
        return [replace(found, metrics={"depth": 2.0}), replace(found, reward=0.25, answer="forty-two")]

    async def close(self) -> None:
        self.life.append("closed")


def test_a_loop_has_a_life_counters_metrics_and_a_reward_of_its_own(queue: Queue, make_worker: Any) -> None:
    loop = Counts()
    sample(make_worker(loop, max_trajectories=2), 2, group_size=1)
    assert loop.life == ["started", "closed"]
    rows = queue.list(where={"is_prompt": None}).in_order()
    assert [tags["reward"] for tags in rows.tags] == [0.25] * 4
    assert [tags.get("metrics") for tags in rows.tags] == [{"depth": 2.0}, None] * 2
    counts = [tags.get("counts") for tags in rows.tags]
    assert counts == [
        None,
        {"tool/search/calls": 2.0},
        None,
        {"tool/search/calls": 2.0, "agent/retokenized_tokens": 2.0},
    ]


def test_the_reward_function_sees_the_answer_that_a_loop_names(queue: Queue, make_worker: Any) -> None:
    class Answers(Counts):
        async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
            return [replace(each, reward=None, answer="A") for each in await super().run(prompt, llm)]

    sample(make_worker(Answers(), max_trajectories=2), 1)
    rows = queue.list(where={"is_prompt": None})
    assert {tags["reward"] for tags in rows.tags} == {1.0}
