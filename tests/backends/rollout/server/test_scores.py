"""Scores of servers: the arrays that travel, the route inside vLLM, and answers of servers that only know JSON."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backends.rollout.server.test_parts import load
from tqppo.errors import EngineError
from tqppo.protocols import EngineSpec, Scores

scores: Any = importlib.import_module("tqppo_backends.rollout.server.scores")
vllm: Any = importlib.import_module("tqppo_backends.rollout.vllm")
sglang: Any = importlib.import_module("tqppo_backends.rollout.sglang")
TOKENS, TOP_K = [5, 6, 7, 8], 2
# The chosen token of row i is TOKENS[i + 1]; the likeliest are 10 + i and 20 + i.
CHOSEN = [-1.5, -2.5, -3.5]
TOPS = [[-0.1, -0.2], [-0.3, -0.4], [-0.5, -0.6]]
IDS = [[10, 20], [11, 21], [12, 22]]


def expected(start: int) -> Scores:
    result = scores.no_scores(len(TOKENS), TOP_K)
    result.logprobs[start:-1], result.top_logprobs[start:-1] = CHOSEN[start:], TOPS[start:]
    result.top_ids[start:-1] = IDS[start:]
    return result


def assert_same(found: Scores, wanted: Scores) -> None:
    np.testing.assert_array_equal(found.logprobs, wanted.logprobs)
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
    np.testing.assert_array_equal(found.top_logprobs, wanted.top_logprobs)
    assert (found.top_ids.dtype, found.top_logprobs.dtype) == (np.int32, np.float32)


@dataclass
class Params:
    """vLLM's `SamplingParams`, as far as the route uses them."""

    temperature: float
    max_tokens: int
    prompt_logprobs: int
    detokenize: bool
    flat_logprobs: bool = False


@dataclass
class FakeVLLM:
    """Scores every sequence alike, after a pause; knows no sequence of more than 4 tokens."""

    pause_s: float = 0.0
    asked: list[Any] = field(default_factory=list)
    num_aborted: int = 0

    async def generate(self, prompt: Any, params: Params, request_id: str) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, request_id))
        try:
            await asyncio.sleep(self.pause_s)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        if len(prompt["prompt_token_ids"]) > len(TOKENS):
            raise ValueError("longer than the context")
        entries = [list(zip([token, *ids], [own, *tops], strict=True)) for token, own, ids, tops in rows()]
        flat = [entry for position in entries for entry in position[: 1 + params.prompt_logprobs]]
        logprobs = SimpleNamespace(token_ids=[i for i, _ in flat], logprobs=[x for _, x in flat])
        yield SimpleNamespace(prompt_logprobs=logprobs)


def rows() -> list[tuple[int, float, list[int], list[float]]]:
    return list(zip(TOKENS[1:], CHOSEN, IDS, TOPS, strict=True))


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("vllm")
    module.__dict__["SamplingParams"] = Params
    monkeypatch.setitem(sys.modules, "vllm", module)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418})

    return load("vllm_guard/tqppo_scores.py").ScoreRoute(app)


async def ask(route: Any, engine: FakeVLLM, body: object, *, path: str = "/tqppo/score", method: str = "POST") -> Any:
    """Status and content of the route's answer; the body comes in two pieces."""
    sent: list[dict[str, Any]] = []
    content = json.dumps(body).encode()
    messages = [{"body": content[:5], "more_body": True}, {"body": content[5:]}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(0.2)
            return {"type": "http.disconnect"}
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    state = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    await route({"type": "http", "path": path, "method": method, "app": state}, receive, send)
    return (sent[0]["status"], b"".join(each.get("body", b"") for each in sent)) if sent else None


@pytest.mark.parametrize("start", [0, 1, 2])
def test_arrays_of_vllms_route_are_the_scores(route: Any, start: int) -> None:
    engine = FakeVLLM()
    body = {"token_ids": TOKENS, "top_k": TOP_K, "start": start, "request_id": "score.1"}
    status, content = asyncio.run(ask(route, engine, body))
    assert status == 200
    assert len(content) == (len(TOKENS) - 1 - start) * (4 + 8 * TOP_K)
    assert_same(scores.unpacked(content, len(TOKENS), TOP_K, start), expected(start))
    prompt, params, request_id = engine.asked[0]
    assert (prompt, request_id) == ({"prompt_token_ids": TOKENS}, "score.1")
    assert params == Params(1.0, 1, TOP_K, detokenize=False, flat_logprobs=True)


def test_vllms_route_scores_the_chosen_tokens_alone(route: Any) -> None:
    body = {"token_ids": TOKENS, "top_k": 0, "start": 1, "request_id": "score.1"}
    _, content = asyncio.run(ask(route, FakeVLLM(), body))
    assert np.frombuffer(content, "<f4").tolist() == CHOSEN[1:]


def test_vllms_route_quotes_a_refusal_and_leaves_other_routes_alone(route: Any, monkeypatch: Any) -> None:
    body = {"token_ids": [*TOKENS, 1], "top_k": 0, "start": 0, "request_id": "score.1"}
    assert asyncio.run(ask(route, FakeVLLM(), body)) == (400, b"longer than the context")
    assert asyncio.run(ask(route, FakeVLLM(), {}, path="/health", method="GET"))[0] == 418
    assert asyncio.run(ask(route, FakeVLLM(), {}, method="GET")) == (200, b"")
    monkeypatch.delattr(Params, "flat_logprobs")  # an older vLLM
    assert asyncio.run(ask(route, FakeVLLM(), {}, method="GET"))[0] == 404


def test_a_client_that_disconnects_ends_its_request_in_vllm(route: Any) -> None:
    engine = FakeVLLM(pause_s=30.0)
    body = {"token_ids": TOKENS, "top_k": 0, "start": 0, "request_id": "score.1"}

    async def work() -> None:
        assert await asyncio.wait_for(ask(route, engine, body), 10) is None
        await asyncio.sleep(0)

    asyncio.run(work())
    assert engine.num_aborted == 1


def test_arrays_of_another_size_than_was_asked_for_are_an_error() -> None:
    with pytest.raises(EngineError, match="12 bytes came for the scores of 3 rows with top-k 2"):
        scores.unpacked(b"\0" * 12, len(TOKENS), TOP_K, 0)


@pytest.mark.parametrize("start", [0, 2])
def test_vllms_json_has_the_chosen_token_within_or_beside_the_likeliest(start: int) -> None:
    entries: list[Any] = [None]
    for token, own, ids, tops in rows():
        ranked = {str(i): {"logprob": x, "rank": rank} for rank, (i, x) in enumerate(zip(ids, tops, strict=True), 1)}
        entries.append({str(token): {"logprob": own, "rank": 9}, **ranked})
    assert_same(vllm._scores(TOKENS, entries, TOP_K, start), expected(start))
    entries[3] = {str(TOKENS[3]): {"logprob": -0.5, "rank": 1}, "22": {"logprob": -0.6, "rank": 2}}
    found = vllm._scores(TOKENS, entries, TOP_K, start)
    assert found.logprobs[2] == np.float32(-0.5)
    assert found.top_ids[2].tolist() == [TOKENS[3], 22]


def sglang_answer(start: int, **tops: object) -> dict[str, Any]:
    chosen = [[None, TOKENS[start], None], *([x, i, None] for i, x, *_ in rows()[start:])]
    return {"input_token_logprobs": chosen, **tops}


@pytest.mark.parametrize("start", [0, 2])
def test_sglangs_flat_and_nested_answers_are_the_same_scores(start: int) -> None:
    nested = [None, *([[x, i, None] for i, x in zip(ids, tops, strict=True)] for *_, ids, tops in rows()[start:])]
    found = sglang._scores(len(TOKENS), sglang_answer(start, input_top_logprobs=nested), TOP_K, start)
    assert_same(found, expected(start))
    flat = {
        "input_top_logprobs_val_flat_b64": base64.b64encode(np.array(TOPS[start:], "<f4").tobytes()).decode(),
        "input_top_logprobs_idx_flat_b64": base64.b64encode(np.array(IDS[start:], "<i4").tobytes()).decode(),
        "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64_dtype": "int32",
        "input_top_logprobs_shape": [len(TOKENS) - 1 - start, TOP_K],
        "input_top_logprobs_null_prefix": 1,
    }
    assert_same(sglang._scores(len(TOKENS), sglang_answer(start, **flat), TOP_K, start), expected(start))


def test_sglang_is_asked_for_arrays_from_the_start_row_on(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Server:
        async def ask(self, method: str, path: str, body: Any, *, timeout_s: float) -> Any:
            asked.append(body)
            return {"meta_info": {**sglang_answer(1), "weight_version": "default"}}

    api = sglang.SGLangServer(EngineSpec(model=str(tmp_path), max_context_tokens=8))
    found = asyncio.run(api.score(Server(), TOKENS, 0, 1, hidden=False))
    assert found.logprobs.tolist() == [0.0, -2.5, -3.5, 0.0]
    assert (asked[0]["logprob_start_len"], asked[0]["return_flat_raw_top_logprobs_b64"]) == (1, True)


def test_what_cannot_be_scored_is_refused_with_the_numbers() -> None:
    spec = EngineSpec(model="m", max_context_tokens=8, name="teacher-0")
    scores.check_sequence(spec, [1] * 8, 7)
    with pytest.raises(EngineError, match="9 tokens were given; teacher-0 scores 1 to 8"):
        scores.check_sequence(spec, [1] * 9, 0)
    with pytest.raises(EngineError, match="start is 8"):
        scores.check_sequence(spec, [1] * 8, 8)


def test_sglangs_hidden_states_are_those_of_the_last_rows() -> None:
    states = np.arange(12.0).reshape(4, 3)  # of the last 4 of 5 tokens: the first was cached
    found = sglang._hidden(5, {"hidden_states": [states.tolist()]}, 2)
    np.testing.assert_array_equal(found, [[0, 0, 0], [0, 0, 0], states[1], states[2], [0, 0, 0]])


@pytest.mark.parametrize("states", [[], [[0.0, 1.0]] * 2, [[0.0, 1.0]] * 6])
def test_hidden_states_of_another_number_of_tokens_are_refused(states: list[list[float]]) -> None:
    with pytest.raises(EngineError, match="for 5 tokens from row 2 on"):
        sglang._hidden(5, {"hidden_states": [states]}, 2)
