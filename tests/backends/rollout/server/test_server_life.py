"""Start, death, restart and end of a server, on a small real one: no engine environment is needed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.backends.rollout.server.small_engine import PYTHON, SmallApi, SmallEngine
from tqppo.errors import EngineError
from tqppo.processes.lifeline import descendants
from tqppo.protocols import EngineSpec, Request, Sampling, WeightSource

HOST = """
import asyncio, sys
from tests.backends.rollout.server.small_engine import SmallEngine, PYTHON
from tqppo.protocols import EngineSpec

async def main():
    engine = SmallEngine(EngineSpec(model="m", max_context_tokens=64, python=PYTHON, engine_args={"mode": "shared"}))
    await engine.start()
    process = engine.servers.process
    print(process.pid, process.scratch, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def spec(tmp_path: Path, **changes: Any) -> EngineSpec:
    settings = {"model": "m", "max_context_tokens": 64, "python": PYTHON, "log_dir": str(tmp_path), "max_restarts": 2}
    return EngineSpec(**{**settings, "start_timeout_s": 60.0, "request_timeout_s": 30.0, **changes})


def request(seed: int = 0, *, seconds: float = 0.0, token: int = 1) -> Request:
    return Request([token], Sampling(temperature=seconds), seed, f"r{seed}")


def weights(tmp_path: Path, version: int) -> WeightSource:
    (tmp_path / "model.safetensors").touch()
    return WeightSource(str(tmp_path), version)


def run(engine: SmallEngine, work: Callable[[SmallEngine], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            await engine.start()
            return await work(engine)
        finally:
            processes = await family(engine)
            await engine.close()
            await engine.close()
            assert not alive(processes), "the server left processes behind"

    return asyncio.run(asyncio.wait_for(whole(), 120))


async def family(engine: SmallEngine) -> list[psutil.Process]:
    process = engine.servers.process
    if process is None:
        return []
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def gone(processes: list[psutil.Process], within_s: float = 30.0) -> bool:
    """Waits, since a killed process ends only when the kernel runs it again."""
    deadline = time.monotonic() + within_s
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(processes)


async def kill_server(engine: SmallEngine) -> None:
    (await family(engine))[1].kill()


def test_many_concurrent_requests_get_their_own_answers(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        answers = await asyncio.gather(*(engine.generate(request(seed)) for seed in range(100)))
        assert [answer.tokens[0] for answer in answers] == list(range(100))

    run(SmallEngine(spec(tmp_path)), work)


def test_a_request_that_dies_with_its_server_is_answered_by_the_next_one_with_the_same_weights(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        await engine.load_weights(weights(tmp_path, 3))
        before = (await engine.generate(request(1))).tokens[1]
        waiting = asyncio.ensure_future(engine.generate(request(7, seconds=1.0)))
        await asyncio.sleep(0.3)
        await kill_server(engine)
        answer = await waiting
        assert answer.tokens[0] == 7
        assert answer.tokens[1] != before, "another process answered"
        assert answer.weight_version == 3
        assert await engine.weights() == "3"

    run(SmallEngine(spec(tmp_path)), work)


def test_a_server_that_dies_idle_is_started_again_without_being_asked(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        await kill_server(engine)
        await asyncio.sleep(0.05)
        assert (await engine.generate(request(5))).tokens[0] == 5
        (incident,) = engine.take_incidents()
        assert incident.process == "rollout-0"
        assert incident.what.startswith("restart 1 of 2: rollout-0 ended with code")
        assert engine.take_incidents() == []

    run(SmallEngine(spec(tmp_path)), work)


def test_the_death_of_the_guard_is_the_death_of_the_server(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        old = await family(engine)
        old[0].kill()
        assert (await engine.generate(request(5))).tokens[0] == 5
        assert gone(old)

    run(SmallEngine(spec(tmp_path)), work)


def test_a_request_that_kills_every_server_fails_with_the_end_of_the_log(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        with pytest.raises(EngineError, match="listening"):
            await engine.generate(request(token=13))

    run(SmallEngine(spec(tmp_path)), work)


def test_restarts_are_bounded(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        with pytest.raises(EngineError, match="max_restarts = 0"):
            await asyncio.gather(engine.generate(request(seconds=5.0)), kill_server(engine))

    run(SmallEngine(spec(tmp_path, max_restarts=0)), work)


@pytest.mark.parametrize("mode", ["die-in-push", "refuse-push"])
def test_a_failed_push_restarts_the_server_with_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("LIVES", str(tmp_path))

    async def work(engine: SmallEngine) -> None:
        await engine.load_weights(weights(tmp_path, 4))
        assert await engine.weights() == "4"
        assert (await engine.generate(request())).weight_version == 4

    run(SmallEngine(spec(tmp_path, engine_args={"mode": mode})), work)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        with pytest.raises(EngineError, match="nothing-here"):
            await engine.load_weights(WeightSource(str(tmp_path / "nothing-here"), 1))

    run(SmallEngine(spec(tmp_path)), work)


def test_a_weight_update_waits_for_running_requests_and_holds_new_ones_back(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(1, seconds=0.5)))
        await asyncio.sleep(0.1)
        update = asyncio.ensure_future(engine.load_weights(weights(tmp_path, 2)))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.generate(request(2)))
        await asyncio.gather(running, update, late)
        assert (running.result().weight_version, late.result().weight_version) == (0, 2)

    run(SmallEngine(spec(tmp_path)), work)


def test_a_server_that_keeps_its_old_weights_is_an_error(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        with pytest.raises(EngineError, match="has weights 'stale' after loading '1'"):
            await engine.load_weights(weights(tmp_path, 1))

    run(SmallEngine(spec(tmp_path, engine_args={"mode": "forget"}, max_restarts=1)), work)


def test_weights_by_broadcast_are_refused_by_a_server_that_cannot_receive_them(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        with pytest.raises(EngineError, match="does not take weights by broadcast"):
            await engine.api.join_group(await engine.servers.live(), None)

    run(SmallEngine(spec(tmp_path)), work)


def test_abort_returns_when_the_request_has_ended(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(3, seconds=20.0)))
        await asyncio.sleep(0)
        await engine.abort("r3")
        assert (await asyncio.wait_for(running, 5)).finish_reason == "abort"
        await engine.abort("r3")

    run(SmallEngine(spec(tmp_path)), work)


def test_a_cancelled_call_ends_its_request_at_the_server(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        slow = Request([1], Sampling(temperature=30.0), 4, "gone")
        running = asyncio.ensure_future(engine.generate(slow))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait({running}, timeout=5)
        assert running.cancelled()
        server = await engine.servers.live()
        answer = await server.ask("POST", "/generate", {"id": "gone.0"}, timeout_s=5)
        assert answer["aborted"]

    run(SmallEngine(spec(tmp_path)), work)


def test_scores_and_sleep_pass_through(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        assert (await engine.score([1, 2, 3], top_k=2)).top_ids.shape == (3, 2)
        assert len(await engine.score_many([[1, 2], [3]], starts=[0, 0])) == 2
        with pytest.raises(EngineError, match="small returns no hidden states"):
            await engine.score([1, 2, 3], hidden=True)
        await engine.sleep()
        await engine.wake()
        engine.expect(["one"])
        engine.end_session("one")

    run(SmallEngine(spec(tmp_path)), work)


class SleepingApi(SmallApi):
    """Writes down which parts sleep and wake."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.log: list[str] = []

    async def sleep(self, server: Any) -> None:
        self.log.append("sleep")

    async def wake(self, server: Any, part: str) -> None:
        self.log.append(part)


class SleepingEngine(SmallEngine):
    api_type = SleepingApi


def test_a_server_on_a_gpu_wakes_part_by_part_and_each_part_once(tmp_path: Path) -> None:
    async def work(engine: SleepingEngine) -> None:
        engine.api.on_gpu = True
        assert engine.held_bytes() is None
        await engine.wake()
        await engine.sleep()
        await engine.sleep()
        assert engine.held_bytes() == 0
        await engine.wake(cache=False)
        await engine.wake(cache=False)
        await engine.wake()
        assert engine.held_bytes() is None
        assert engine.api.log == ["sleep", "weights", "cache"]

    run(SleepingEngine(spec(tmp_path)), work)


@pytest.mark.slow
def test_a_request_that_waits_for_its_turn_is_not_late(tmp_path: Path) -> None:
    """120 requests of a second, 20 at a time: all together they take longer than one of them may."""

    async def work(engine: SmallEngine) -> None:
        answers = await asyncio.gather(*(engine.generate(request(i, seconds=1.0)) for i in range(120)))
        assert [answer.tokens[0] for answer in answers] == list(range(120))

    run(SmallEngine(spec(tmp_path, max_running=20, request_timeout_s=3.5)), work)


def test_a_server_that_dies_at_its_start_is_reported_at_once_with_its_log(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(EngineError, match="not to my liking"):
        run(SmallEngine(spec(tmp_path, engine_args={"mode": "die-at-start"})), work)


def test_a_server_that_never_becomes_healthy_is_ended_at_the_deadline(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        raise AssertionError("it must not start")

    before = set(descendants(os.getpid()))
    with pytest.raises(EngineError, match="not healthy after"):
        run(SmallEngine(spec(tmp_path, start_timeout_s=1.5, engine_args={"mode": "never-healthy"})), work)
    assert set(descendants(os.getpid())) <= before


def test_routes_can_be_looked_for_and_the_bytes_of_answers_are_counted(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        server = await engine.servers.live()
        assert await server.has_route("/model")
        assert not await server.has_route("/tqppo/score")
        before = server.num_bytes_received
        content = await server.ask_bytes("POST", "/generate", {"seed": 3}, timeout_s=10)
        assert json.loads(content)["seed"] == 3
        assert server.num_bytes_received == before + len(content)

    run(SmallEngine(spec(tmp_path)), work)


def test_a_server_that_is_refused_at_the_attachment_leaves_no_open_connection(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        url = (await engine.servers.live()).url
        attached = SmallEngine(spec(tmp_path, endpoint=url))  # it expects another name than the server's
        with pytest.raises(EngineError, match="another model"):
            await attached.start()
        assert attached.api.inspected._session.closed
        await attached.close()

    run(SmallEngine(spec(tmp_path)), work)


def test_a_request_to_a_closed_server_is_an_engine_error(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        server = await engine.servers.live()
        await server.close()
        with pytest.raises(EngineError, match="ended with code"):
            await server.ask("GET", "/weights", timeout_s=5)
        assert not await server.is_healthy()

    run(SmallEngine(spec(tmp_path)), work)


def test_a_request_that_takes_too_long_fails_at_its_deadline(tmp_path: Path) -> None:
    async def work(engine: SmallEngine) -> None:
        with pytest.raises(EngineError, match="did not answer within"):
            await engine.generate(request(seconds=20.0))

    run(SmallEngine(spec(tmp_path, request_timeout_s=0.5)), work)


def test_an_engine_that_was_not_started_refuses_requests(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(SmallEngine(spec(tmp_path)).generate(request()))


def test_nothing_survives_the_sigkill_of_the_host() -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]
    )
    assert host.stdout is not None
    pid, scratch = host.stdout.readline().split()
    processes = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
    assert len(processes) == 3, "guard, server and the server's own child"
    os.kill(host.pid, signal.SIGKILL)
    host.communicate()
    assert gone(processes)
    assert not Path(scratch).exists()
    assert not Path(f"/dev/shm/psm_small_{processes[1].pid}").exists()


def test_the_log_is_kept_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def work(engine: SmallEngine) -> None:
        return None

    run(SmallEngine(spec(tmp_path, name="rollout-3", log_dir="logs/1")), work)  # relative, as a run's folder may be
    log = (tmp_path / "logs/1/rollout-3.log").read_text()
    assert log.startswith("$ ")
    assert "listening" in log
