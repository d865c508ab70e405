"""Tests of both real engines besides the contract; `test_vllm` and `test_sglang` import them all.

`subject` is the engine of the whole file, `untied_subject` a second model for one test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tqppo import plugins
from tqppo.contracts.rollout import (
    EOS,
    Subject,
    assert_exact,
    check_updates,
    open_subject,
    prompts,
    publish_head,
    request,
)
from tqppo.errors import BackendError, EngineError
from tqppo.protocols import EngineSpec, WeightSource
from tqppo.tiny.model import write_tiny_model
from tqppo.weights.send import Sender, SenderClient
from tqppo.weights.verify import Probe, verify_logprobs

T = TypeVar("T")
HOST = """
import asyncio, json, sys
from urllib import error, request
from tqppo import plugins
from tqppo.protocols import EngineSpec

def status(url):
    try:
        return request.urlopen(url, timeout=20).status
    except error.HTTPError as refusal:
        return refusal.code

async def main():
    engine = plugins.load("rollout", sys.argv[1])(EngineSpec(model=sys.argv[2], max_context_tokens=128, host="0.0.0.0"))
    await engine.start()
    server = await engine.servers.live()
    paths = ("/health", "/v1/models", sys.argv[3])
    found = {path: await asyncio.to_thread(status, server.url + path) for path in paths}
    print(json.dumps({"pid": server.process.pid, "scratch": server.process.scratch, "status": found}), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def subject(
    backend_name: str, event_loop_of_run: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """One server for the whole file, on a Llama-style model with a tied head; gone before the next file."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tied"), seed=1)
    logs = tmp_path_factory.mktemp("logs")
    yield from open_subject(backend_name, folder, event_loop_of_run, {"max_restarts": 5}, logs)


@pytest.fixture(scope="module")
def untied_subject(
    backend_name: str,
    untied_model: Mapping[str, Any],
    event_loop_of_run: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    folder = write_tiny_model(tmp_path_factory.mktemp("untied"), tie_embeddings=False, seed=1, **untied_model)
    logs = tmp_path_factory.mktemp("untied-logs")
    yield from open_subject(backend_name, folder, event_loop_of_run, {"max_running": 32, "scores_hidden": False}, logs)


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


@contextmanager
def sending(subject: Subject, sender: Sender, bucket_bytes: int) -> Iterator[None]:
    """Weights go over a process group meanwhile, in pieces of this size."""
    engine: Any = subject.engine
    subject.sender, engine.loader.bucket_bytes = SenderClient(sender), bucket_bytes
    try:
        yield
    finally:
        subject.sender = None
        del engine.loader.bucket_bytes


def patiently(subject: Subject, work: Coroutine[Any, Any, T]) -> T:
    """For what includes the start of a server, which takes minutes on a busy machine."""
    return subject.loop.run_until_complete(asyncio.wait_for(work, 600))


def recover(subject: Subject) -> None:
    """Wait until a server runs; the engine may not have noticed yet that the last one died."""
    engine: Any = subject.engine
    patiently(subject, engine.generate(request([65], max_new_tokens=1)))


def processes_of(subject: Subject) -> list[psutil.Process]:
    """The guard, the server and its children."""
    engine: Any = subject.engine
    leader = psutil.Process(subject.run(engine.servers.live()).process.pid)
    return [leader, *leader.children(recursive=True)]


def assert_gone(processes: list[psutil.Process], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_a_probe_is_scored_as_the_trainer_scores_it_and_old_weights_are_noticed(subject: Subject) -> None:
    probe = prompts(1, longest=40, seed=4)[0]
    expected = subject.logits(probe).log_softmax(-1)[range(len(probe) - 1), probe[1:]].tolist()
    assert subject.run(verify_logprobs(subject.engine, Probe(probe, expected, 1e-4))) <= 1e-4
    with pytest.raises(EngineError, match="does not run the new weights"):
        subject.run(verify_logprobs(subject.engine, Probe(probe, [x - 0.01 for x in expected], 1e-4)))


@pytest.mark.parametrize("compact", [True, False], ids=["arrays", "json"])
def test_scores_are_those_of_the_embedded_engine(subject: Subject, compact: bool) -> None:
    """Each server is within half of 1e-4 of the embedded engine, so any two engines agree to 1e-4."""
    sequences = prompts(16, longest=200, seed=41)
    starts = [len(tokens) // 2 for tokens in sequences]
    embedded = plugins.load("rollout", "embedded")(EngineSpec(model=str(subject.folder), max_context_tokens=512))
    subject.run(embedded.start())
    subject.load(subject.folder)
    expected = subject.run(embedded.score_many(sequences, 64, starts=starts))
    subject.run(embedded.close())
    engine: Any = subject.engine
    assert engine.api.compact_scores, "the genuine engines answer arrays"
    engine.api.compact_scores = compact
    try:
        found = subject.score(*sequences, top_k=64, starts=starts)
    finally:
        engine.api.compact_scores = True
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=5e-5)
        np.testing.assert_allclose(theirs.top_logprobs, ours.top_logprobs, atol=5e-5)
        is_clear = np.abs(np.diff(ours.top_logprobs, axis=1)).min(axis=1, initial=1) > 1e-4  # no two could swap places
        np.testing.assert_array_equal(theirs.top_ids[is_clear, :-1], ours.top_ids[is_clear, :-1])


def test_a_server_that_already_runs_can_be_used_if_it_has_the_model(
    subject: Subject, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: Any = subject.engine
    attached = EngineSpec(
        model=str(subject.folder),
        max_context_tokens=running.spec.max_context_tokens,
        endpoint=subject.run(running.servers.live()).url,
        eos_token_ids=(EOS,),
    )
    with pytest.raises(EngineError, match="answered 401"):  # on loopback too
        subject.run(type(running)(attached).start())
    monkeypatch.setenv("TQPPO_ROLLOUT_TOKEN", running.servers._api.token)
    engine = type(running)(attached)
    asked = request(prompts(1)[0], seed=9, max_new_tokens=8)
    subject.run(engine.start())
    assert subject.run(engine.generate(asked)).tokens == subject.generate(asked)[0].tokens
    subject.run(engine.close())
    with pytest.raises(BackendError, match="another-model"):
        subject.run(type(running)(replace(attached, model="/models/another-model")).start())
    assert_exact(subject, [asked], tolerance)  # it goes on after the attached engine has left


def test_prompts_of_more_tokens_than_one_step_takes_are_generated_with_their_seeds(
    untied_subject: Subject, tolerance: float
) -> None:
    asked = [request(p * 15, seed=i, max_new_tokens=4) for i, p in enumerate(prompts(60, longest=30, seed=31))]
    assert sum(len(each.tokens) for each in asked) > 8192
    assert_exact(untied_subject, asked, tolerance)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_over_a_process_group_are_exact_in_one_bucket_and_in_many(
    tied: bool, request: pytest.FixtureRequest, sender: Sender, tolerance: float, tmp_path: Path
) -> None:
    chosen = request.getfixturevalue("subject" if tied else "untied_subject")
    size = sum(parameter.nbytes for parameter in chosen.reference.parameters())
    for bucket_bytes in (size // 5, 2**30):
        with sending(chosen, sender, bucket_bytes):
            check_updates(chosen, tolerance, tmp_path / f"over-{bucket_bytes}", tie_embeddings=tied)
    assert len(sender.groups) == 1, "the group is kept for the next update"
    check_updates(chosen, tolerance, tmp_path / "file", tie_embeddings=tied)  # and a file still works


@pytest.mark.faults
def test_kill_9_of_the_server_in_mid_generation_changes_no_result(subject: Subject, tolerance: float) -> None:
    asked = [request(p, seed=i, max_new_tokens=200) for i, p in enumerate(prompts(16, seed=21))]
    before = subject.generate(*asked)
    processes = processes_of(subject)

    async def work() -> list[Any]:
        tasks = [asyncio.ensure_future(subject.engine.generate(each)) for each in asked]
        await asyncio.sleep(0.15)
        processes[1].kill()
        return await asyncio.gather(*tasks)

    after = patiently(subject, work())
    assert {c.weight_version for c in after} == {subject.version}
    assert sum(a.tokens == b.tokens for a, b in zip(after, before, strict=True)) >= 12  # other batches, other last bits
    assert_exact(subject, asked[:4], tolerance)
    assert_gone(processes)


@pytest.mark.faults
def test_kill_9_of_an_inner_process_of_an_idle_server_is_survived(subject: Subject, tolerance: float) -> None:
    processes = processes_of(subject)
    next(p for p in processes if p.name().endswith(("EngineCore", "scheduler"))).kill()
    recover(subject)
    asked = [request(p, seed=i, max_new_tokens=8) for i, p in enumerate(prompts(4, seed=22))]
    completions = assert_exact(subject, asked, tolerance)
    assert {completion.weight_version for completion in completions} == {subject.version}
    assert_gone(processes)


@pytest.mark.faults
@pytest.mark.parametrize("by", ["file", "broadcast"])
def test_kill_9_of_the_server_in_mid_push_ends_with_the_new_weights(
    by: str, subject: Subject, sender: Sender, tolerance: float, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "new", seed=55)
    publish_head(folder)
    processes = processes_of(subject)
    subject.version += 1
    source = WeightSource(str(folder), subject.version, sender=SenderClient(sender) if by == "broadcast" else None)

    async def push() -> None:
        pushing = asyncio.ensure_future(subject.engine.load_weights(source))
        await asyncio.sleep(0.01 if by == "file" else 0.05)
        processes[1].kill()
        await pushing

    patiently(subject, push())
    subject.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = [request(p, seed=i, max_new_tokens=8) for i, p in enumerate(prompts(4, seed=23))]
    completions = assert_exact(subject, asked, tolerance)
    assert {completion.weight_version for completion in completions} == {subject.version}
    assert_gone(processes)


@pytest.mark.faults
def test_beyond_loopback_a_token_is_needed_and_nothing_survives_the_sigkill_of_the_host(
    backend_name: str, control_route: str, tiny_model: Path
) -> None:
    command = [sys.executable, "-c", HOST, backend_name, str(tiny_model), control_route]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    printed = json.loads(host.stdout.readline())
    assert printed["status"] == {"/health": 200, "/v1/models": 401, control_route: 401}
    processes = [psutil.Process(printed["pid"]), *psutil.Process(printed["pid"]).children(recursive=True)]
    assert len(processes) >= 3
    os.kill(host.pid, signal.SIGKILL)
    host.communicate()
    assert_gone(processes)
    assert not Path(printed["scratch"]).exists()


def test_an_argument_that_the_engine_does_not_know_is_reported_in_its_own_words(
    backend_name: str, event_loop_of_run: asyncio.AbstractEventLoop, tiny_model: Path
) -> None:
    spec = EngineSpec(
        model=str(tiny_model), max_context_tokens=128, engine_args={"no-such-flag": 1}, eos_token_ids=(EOS,)
    )
    engine = plugins.load("rollout", backend_name)(spec)
    with pytest.raises(EngineError, match="no-such-flag"):
        event_loop_of_run.run_until_complete(engine.start())
    event_loop_of_run.run_until_complete(engine.close())
