"""The parts of server engines that need no server: the gate, transfers, and what runs inside vLLM and SGLang."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tqppo.errors import EngineError
from tqppo.protocols import EngineSpec
from tqppo.weights import checksum
from tqppo.weights.identity import WeightReport, check_identity

server: Any = {name: importlib.import_module(f"tqppo_backends.rollout.server.{name}") for name in ("gate", "group")}
cache: Any = importlib.import_module("tqppo_backends.rollout.server.cache")
ROLLOUT = Path(server["gate"].__file__).parents[1]


def load(path: str) -> ModuleType:
    """A module that only the engines' own interpreters have on their path."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROLLOUT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_update_waits_for_running_requests_and_holds_new_ones_back() -> None:
    events: list[str] = []

    async def request(gate: Any, name: str, seconds: float) -> None:
        async with gate.passing(5.0):
            await asyncio.sleep(seconds)
            events.append(name)

    async def update(gate: Any) -> None:
        async with gate.closed(5.0):
            events.append("update")

    async def whole() -> None:
        gate = server["gate"].Gate()
        first = asyncio.ensure_future(request(gate, "first", 0.1))
        await asyncio.sleep(0)
        await asyncio.gather(update(gate), request(gate, "second", 0.0), first)

    asyncio.run(whole())
    assert events == ["first", "update", "second"]


def test_a_request_that_does_not_end_fails_the_update_and_opens_the_gate_again() -> None:
    async def whole() -> None:
        gate = server["gate"].Gate()
        async with gate.passing(5.0):
            with pytest.raises(EngineError, match="1 requests were still running"):
                async with gate.closed(0.05):
                    pass
        async with gate.passing(5.0):
            pass

    asyncio.run(whole())


def test_a_request_waits_for_a_weight_update_no_longer_than_its_deadline() -> None:
    async def whole() -> None:
        gate = server["gate"].Gate()
        async with gate.closed(5.0):
            for waiting, what in ((gate.passing(0.05), "a request"), (gate.closed(0.05), "a weight update")):
                with pytest.raises(EngineError, match=f"{what} waited 0.05 s for a weight update to end"):
                    async with waiting:
                        pass
        async with gate.passing(5.0):
            pass

    asyncio.run(asyncio.wait_for(whole(), 30))


async def after(seconds: float, error: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error


def test_the_servers_error_takes_precedence_over_the_senders() -> None:
    async def whole() -> None:
        sender, engine = EngineError("connection closed"), EngineError("no such tensor")
        with pytest.raises(EngineError, match="no such tensor"):
            await server["group"].run_both(after(0.1, engine), after(0.0, sender), 5.0)

    asyncio.run(whole())


def test_a_transfer_ends_at_its_deadline() -> None:
    with pytest.raises(EngineError, match=r"not transferred within 0\.05 s"):
        asyncio.run(server["group"].run_both(after(60.0), after(60.0), 0.05))


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [("/health", "", 200), ("/pause", "", 401), ("/pause", "x", 401), ("/pause", "key", 200)],
)
def test_every_route_of_vllm_but_health_needs_the_token(
    monkeypatch: pytest.MonkeyPatch, path: str, token: str, status: int
) -> None:
    monkeypatch.setenv("TQPPO_SERVER_TOKEN", "key")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Callable[[dict[str, Any]], Any]) -> None:
        await send({"type": "http.response.start", "status": 200})

    guard = load("vllm_guard/tqppo_guard.py").RequireToken(app)
    scope = {"type": "http", "path": path, "headers": [(b"authorization", f"Bearer {token}".encode())]}
    asyncio.run(guard(scope, None, send))
    assert sent[0]["status"] == status


def test_a_websocket_of_vllm_without_the_token_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQPPO_SERVER_TOKEN", "key")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was let in")

    guard = load("vllm_guard/tqppo_guard.py").RequireToken(app)
    asyncio.run(guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


class FakeGroup:
    """Broadcasts one tensor after another, as the sender does."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def broadcast(self, target: torch.Tensor, rank: int) -> FakeGroup:
        target.copy_(self.tensors.pop(0).reshape(-1).view(torch.uint8))
        return self

    def wait(self) -> None:
        pass


def test_buckets_arrive_in_vllm_as_the_tensors_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQPPO_CHECKSUM", checksum.__file__)
    receiver = load("vllm_guard/tqppo_weights.py").Receiver()
    first, second, half = torch.randn(2, 3), torch.randn(4), torch.randn(5).bfloat16()
    receiver.device = torch.device("cpu")
    receiver.tqppo_group = FakeGroup(torch.cat([first.flatten(), second]), half)
    buckets = [
        {"names": ["a", "b"], "dtype": "float32", "shapes": [[2, 3], [4]]},
        {"names": ["c"], "dtype": "bfloat16", "shapes": [[5]]},
    ]
    found = {name: tensor.clone() for name, tensor in receiver.tqppo_stream(buckets)}
    assert found.keys() == {"a", "b", "c"}
    assert all(torch.equal(found[name], sent) for name, sent in (("a", first), ("b", second), ("c", half)))


def test_sglang_says_by_checksums_which_weights_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with half of a joined parameter each, as tensor parallelism has them."""
    monkeypatch.setenv("TQPPO_CHECKSUM", checksum.__file__)
    report = load("sglang_guard/tqppo_weights.py").report
    published = {f"layer.{name}.weight": torch.randn(4, 6) for name in ("q_proj", "k_proj", "v_proj")}
    joined = torch.cat(list(published.values()))
    for number, half in enumerate(joined.split(6)):
        monkeypatch.setattr("os.getpid", lambda number=number: number)
        model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(6, 6, bias=False)})})
        with torch.no_grad():
            next(model.parameters()).copy_(half)
        report(model, [(str(tmp_path), torch.zeros(1))])
    told = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    reports = [WeightReport(each["held"], parts=each["parts"]) for each in told]
    checksums = {name: checksum.checksum(tensor) for name, tensor in published.items()}
    assert check_identity("rollout-0", checksums, reports) == 1
    published["layer.k_proj.weight"].view(torch.int32)[2, 3] ^= 1
    checksums = {name: checksum.checksum(tensor) for name, tensor in published.items()}
    with pytest.raises(EngineError, match=r"layer\.qkv_proj\.weight"):
        check_identity("rollout-0", checksums, reports)


def test_the_hash_of_sglangs_seeds_depends_on_seed_position_and_column_and_is_uniform() -> None:
    counter_hash = load("sglang_cpu/sitecustomize.py").counter_hash
    seeds, positions, columns = torch.tensor([1, 2, 1]), torch.tensor([7, 7, 8]), torch.arange(4096)
    found = counter_hash(seeds, positions, columns)
    assert torch.equal(found[:1], counter_hash(seeds[:1], positions[:1], columns))
    assert len(found.unique()) > 3 * 4096 - 10
    assert ((found / 2**32).mean(1) - 0.5).abs().max() < 0.03


def test_the_stand_in_for_sglangs_kernels_is_imported_only_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    with pytest.raises(ImportError, match="no kernels"):
        load("sglang_cpu/sgl_kernel/__init__.py")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(RuntimeError, match="CUDA kernel"):
        load("sglang_cpu/sgl_kernel/__init__.py").some_kernel()


def test_the_cache_holds_every_sequence_that_runs_at_once_at_its_longest() -> None:
    block = cache.BLOCK_TOKENS
    spec = EngineSpec(model="", max_context_tokens=100, max_running=7)
    assert cache.cache_tokens(spec, 100) == 7 * block
    assert cache.cache_tokens(spec, block + 1) == 7 * 2 * block
    assert cache.cache_tokens(replace(spec, max_running=1), 100) == 2 * block


def test_a_token_takes_its_keys_and_values_of_all_layers(tiny_model: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    spec = EngineSpec(model=str(tiny_model), max_context_tokens=8, dtype="float32")
    assert cache.token_bytes(spec) == 2 * config.num_hidden_layers * width * 4
    assert cache.token_bytes(replace(spec, dtype="bfloat16")) == 2 * config.num_hidden_layers * width * 2


SEEN = """
import json, os, sys
print(json.dumps([__name__, sys.argv[1:], open("/proc/self/cmdline").read(), dict(os.environ)]))
"""


def test_sglang_gets_its_token_and_no_process_list_shows_it(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(SEEN)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROLLOUT / 'sglang_guard'}", "TQPPO_SERVER_TOKEN": "-secret"}
    command = [sys.executable, "-m", "tqppo_launch", "--port", "1"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    name, arguments, shown, inherited = json.loads(printed)
    assert (name, arguments) == ("__main__", ["--port", "1", "--api-key=-secret"])
    assert "secret" not in shown
    assert "TQPPO_SERVER_TOKEN" not in inherited
