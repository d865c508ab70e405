"""Command lines and environments of servers; no server is started."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from tqppo import plugins
from tqppo.errors import BackendError, EngineError, PreflightError
from tqppo.protocols import EngineSpec, Request, Sampling

VLLM, SGLANG = plugins.load("rollout", "vllm"), plugins.load("rollout", "sglang")
api: Any = importlib.import_module("tqppo_backends.rollout.server.api")
process: Any = importlib.import_module("tqppo_backends.rollout.server.process")


def spec(model: Path, **changes: Any) -> EngineSpec:
    return EngineSpec(**{"model": str(model), "max_context_tokens": 128, **changes})


def command(engine: Any) -> list[str]:
    return [*engine.api.command("python", 20_000), *engine.api.flags()]


def test_flags_take_booleans_numbers_lists_tables_and_nothing() -> None:
    arguments = {"a": True, "b": False, "c": 2, "d": ["x", 1], "e": {"k": 1}, "f": None}
    assert api.to_flags(arguments, negatable=True) == [
        "--a",
        "--no-b",
        "--c",
        "2",
        "--d",
        "x",
        "1",
        "--e",
        '{"k": 1}',
    ]
    assert "--no-b" not in api.to_flags(arguments, negatable=False)


@pytest.mark.parametrize("engine_class", [VLLM, SGLANG])
def test_a_users_argument_replaces_ours(engine_class: Any, tiny_model: Path) -> None:
    name = "kv-cache-memory-bytes" if engine_class is VLLM else "max-total-tokens"
    engine = engine_class(spec(tiny_model, engine_args={name.replace("-", "_"): 1234}))
    found = command(engine)
    assert found.count(f"--{name}") == 1
    assert found[found.index(f"--{name}") + 1] == "1234"


@pytest.mark.parametrize("engine_class", [VLLM, SGLANG])
@pytest.mark.parametrize("name", ["port", "host", "dtype", "--api-key", "served_model_name", "trust-remote-code"])
def test_arguments_that_tqppo_sets_itself_are_refused_by_name(engine_class: Any, name: str, tiny_model: Path) -> None:
    with pytest.raises(PreflightError, match=name):
        engine_class(spec(tiny_model, engine_args={name: "x"}))


@pytest.mark.parametrize("engine_class", [VLLM, SGLANG])
def test_the_constructor_starts_nothing_and_close_is_harmless(engine_class: Any, tiny_model: Path) -> None:
    asyncio.run(engine_class(spec(tiny_model)).close())


@pytest.mark.parametrize("engine_class", [VLLM, SGLANG])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_every_server_has_a_token_of_its_own_that_is_in_no_command_line(
    engine_class: Any, host: str, tiny_model: Path
) -> None:
    one, other = (engine_class(spec(tiny_model, host=host)).api for _ in range(2))
    assert len(one.token) >= 32
    assert one.token != other.token
    assert one.environment()["TQPPO_SERVER_TOKEN"] == one.token
    assert one.token not in " ".join([*one.command("python", 1), *one.flags()])


def test_on_a_gpu_the_same_code_has_other_flags(tiny_model: Path) -> None:
    vllm, sglang = (c(spec(tiny_model, tensor_parallel=2, memory_fraction=0.4)) for c in (VLLM, SGLANG))
    vllm.api.on_gpu = sglang.api.on_gpu = True
    assert {"--tensor-parallel-size", "--gpu-memory-utilization", "--enable-sleep-mode"} <= set(command(vllm))
    assert {"--tensor-parallel-size", "--mem-fraction-static", "--enable-memory-saver"} <= set(command(sglang))
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(command(vllm))
    assert "SGLANG_USE_CPU_ENGINE" not in sglang.api.environment()


def test_the_placement_decides_between_gpus_and_the_cpu(tiny_model: Path) -> None:
    for engine_class in (VLLM, SGLANG):
        assert engine_class(spec(tiny_model, devices=("2", "3"))).api.on_gpu
        assert not engine_class(spec(tiny_model, devices=())).api.on_gpu


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not api.has_gpu()


def test_a_prompt_that_fills_the_context_is_refused_before_it_is_sent(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="128"):
        asyncio.run(VLLM(spec(tiny_model)).generate(Request([1] * 128, Sampling(), 0, "r")))


def test_ports_are_free_and_differ() -> None:
    ports = {process.free_port() for _ in range(20)}
    assert len(ports) >= 19
    assert all(20_000 <= port < 32_000 for port in ports)


def test_the_servers_environment_has_nothing_of_the_hosts_interpreter_or_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "RAY_JOB_ID"):
        monkeypatch.setenv(name, "x")
    found = process.clean_environment({"A": "1"})
    assert found["A"] == "1"
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "RAY_JOB_ID"} & found.keys()


@pytest.mark.parametrize("engine_class", [VLLM, SGLANG])
def test_attaching_to_an_address_without_a_server_is_an_error(engine_class: Any, tiny_model: Path) -> None:
    engine = engine_class(spec(tiny_model, endpoint=f"http://127.0.0.1:{process.free_port()}"))
    with pytest.raises(BackendError, match="no healthy"):
        asyncio.run(engine.start())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_environment_names_the_command_that_makes_it(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQPPO_ENGINES", str(tmp_path))
    engine = plugins.load("rollout", name)(spec(tiny_model))

    async def start_and_close() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(BackendError, match=f"tqppo backends install {name}") as caught:
        asyncio.run(start_and_close())
    assert caught.value.exit_code == 4
