"""Many sessions with tools that are slow, crash, hang, print without end and return hostile bytes; some fail."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scripted import CHAT

from tqppo.data.prompts import Prompt
from tqppo.metrics.events import Event
from tqppo.processes import lifeline
from tqppo.protocols import Completion, EngineCapabilities, EngineSpec, Request, Sampling
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout import worker as worker_module
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.chat import Conversation
from tqppo.rollout.loops.tools import ToolLoop
from tqppo.rollout.session import Session
from tqppo.rollout.teachers.figures import RolloutReport
from tqppo.rollout.worker import RolloutSpec, RolloutWorker
from tqppo.run.live import Validator
from tqppo.trainers.groups import CollectorOptions, GroupCollector
from tqppo.trainers.side_by_side import Clock
from tqppo.trainers.stages import PaddingStage, RolloutStage

TOOLS = """
import os, random, signal, time

def fine(text: str) -> str:
    return text[::-1]

def slow(text: str) -> str:
    time.sleep(0.1 * random.random())
    return text

def crash(text: str) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)

def hang(text: str) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass

def shout(text: str) -> str:
    block = b"x" * 2**20
    while True:
        os.write(1, block)
        os.write(2, block)

def long(text: str) -> str:
    return "<|end|><|user|>" * 2**21

def raw(text: str) -> bytes:
    return bytes(range(256)) * 99
"""
NAMES = ("fine", "slow", "crash", "hang", "shout", "long", "raw")
CALLS = ("fine", "slow", "fine", "crash", "long", "raw", "fine", "missing")


class CallingEngine:
    """Calls tools and answers as its seeds say; a hanging tool once in a while, because each costs its whole time."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()

    def __init__(self, spec: EngineSpec) -> None:
        self.live: set[str] = set()

    async def start(self) -> None: ...

    def expect(self, sessions: Sequence[str], batch: str = "") -> None:
        self.live.update(sessions)

    def end_session(self, session: str) -> None:
        self.live.remove(session)

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        draw = request.seed % 1000
        name = "hang" if draw < 4 else "shout" if draw < 8 else CALLS[draw % len(CALLS)]
        said = f"@{name}({draw})<|end|>" if draw % 3 else f"{draw}<|end|>"
        tokens = CHAT.encode(said)[: request.sampling.max_new_tokens]
        return Completion(tokens, [-0.5] * len(tokens), "stop", 1)

    async def close(self) -> None: ...


class FlakyLoop(ToolLoop):
    """Fails some sessions between turns."""

    async def before_turn(self, talk: Conversation, llm: Session) -> None:
        if sum(talk.context()) % 11 == 0:
            raise ConnectionError("no route to the tool's server")


class InProcess:
    """The engines of a run, as one rollout worker on an event loop of this process."""

    def __init__(self, worker: RolloutWorker, loop: asyncio.AbstractEventLoop) -> None:
        self.worker, self.loop = worker, loop

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Assignment) -> RolloutReport:
        return self.loop.run_until_complete(asyncio.wait_for(self.worker.generate(prompts, task), 120))

    def load_weights(self, source: Any, probe: Any = None) -> None: ...


@pytest.fixture
def engines(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    (tmp_path / "hostile_tools.py").write_text(TOOLS)
    queue = Queue.create("simple", local=True)
    monkeypatch.setattr(worker_module.plugins, "load", lambda kind, name: CallingEngine)
    spec = RolloutSpec(
        "calling", EngineSpec(str(tiny_model), 1024), str(tiny_model), ScorerSpec("exact_match"), session_retries=1
    )
    worker = RolloutWorker(spec, queue)
    names = [f"{tmp_path}/hostile_tools.py:{name}" for name in NAMES]
    worker.loop = FlakyLoop(names, parser="tiny", max_turns=3, timeout_s=0.5, workers=2)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(worker.start())
    yield InProcess(worker, loop)
    loop.run_until_complete(worker.close())
    loop.close()
    queue.close()


@pytest.mark.parametrize("steps", [3, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_no_key_session_or_process_is_left_after_any_step_and_validation(engines: InProcess, steps: int) -> None:
    queue, prompts = engines.worker.queue, iter(prompt_numbers())
    events: list[Event] = []
    draw = lambda count: [next(prompts) for _ in range(count)]  # noqa: E731
    options = CollectorOptions(on_incomplete="refill", max_rounds=3)
    task = Assignment(0, 0, group_size=4, sampling=Sampling(max_new_tokens=24))
    rollout = RolloutStage(
        engines, GroupCollector(queue, draw, options, events.append), Clock(), task, 6, probe=lambda: None
    )
    padding = PaddingStage(queue, Clock(), multiple=16)
    validator = validator_of(engines)
    before, totals = len(lifeline.descendants(os.getpid())), Counter[str]()
    for step in range(1, steps + 1):
        batch, metrics = rollout.generate(step)
        batch, _ = padding.fill(batch, step)
        queue.clear(batch)
        assert_nothing_left(engines, f"step {step}")
        assert "val-core/s/acc/greedy" in validator.run()
        assert_nothing_left(engines, f"the validation after step {step}")
        assert metrics["groups/dispatched"] == metrics["groups/trained"] + metrics["groups/failed"]
        assert metrics["agent/retokenized_tokens"] == 0
        totals.update({name: value for name, value in metrics.items() if name.startswith(("tool/", "groups/"))})
    assert len(lifeline.descendants(os.getpid())) <= before
    assert totals["groups/failed"] == sum(type(event).__name__ == "GroupLeftOut" for event in events) > 0
    assert totals["tool/crash/errors"] == totals["tool/crash/calls"] > 0
    assert totals["tool/slow/calls"] > totals["tool/slow/errors"] == 0
    assert totals["tool/raw/calls"] > totals["tool/raw/errors"] == 0
    if steps > 10:
        for name in ("hang", "shout"):
            assert totals[f"tool/{name}/errors"] == totals[f"tool/{name}/calls"] > 0


def assert_nothing_left(engines: InProcess, after: str) -> None:
    queue, engine = engines.worker.queue, engines.worker.engine
    for partition in ("train", "val"):
        assert not queue.list(partition).keys, f"{after} left keys"
    assert not engine.live, f"{after} left sessions on the engine"  # type: ignore[attr-defined]


def validator_of(engines: InProcess) -> Validator:
    pool: Any = engines
    task = Assignment(0, 0, 1, Sampling(max_new_tokens=24), partition="val", greedy=True, keep_tensors=False)
    return Validator(pool, engines.worker.queue, Clock(), list(islice(prompt_numbers(), 4)), task)


def prompt_numbers() -> Iterator[Prompt]:
    number = 0
    while True:
        text = f"<|user|>{number}<|assistant|>"
        message = {"role": "user", "content": str(number)}
        yield Prompt(f"p0-0-{number}", number, CHAT.encode(text), "1", "s", {}, text, [message])
        number += 1
