"""The KV cache of an engine on a CPU follows the model, the number of sequences and their length."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tqppo import plugins
from tqppo.protocols import EngineSpec

cache: Any = importlib.import_module("tqppo_backends.rollout.server.cache")
# two layers, keys and values of two heads of 32 numbers, in float32
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4


def argument(backend: str, spec: EngineSpec, name: str) -> int:
    engine = plugins.load("rollout", backend)(spec)
    return int(engine.api.arguments()[name])


@pytest.mark.parametrize(("rows", "tokens"), [(16, 100), (256, 1000)])
def test_the_cache_holds_every_sequence_at_its_longest(rows: int, tokens: int, tiny_model: Path) -> None:
    spec = EngineSpec(str(tiny_model), max_context_tokens=tokens, max_running=rows)
    assert (
        rows * tokens * TOKEN_BYTES
        <= argument("vllm", spec, "kv-cache-memory-bytes")
        < 2 * rows * (tokens + 64) * TOKEN_BYTES
    )
    assert rows * tokens <= argument("sglang", spec, "max-total-tokens") < 2 * rows * (tokens + 64)


def test_half_precision_halves_the_bytes(tiny_model: Path) -> None:
    spec = EngineSpec(str(tiny_model), max_context_tokens=100, max_running=8)
    whole, half = (
        argument("vllm", replace(spec, dtype=dtype), "kv-cache-memory-bytes") for dtype in ("auto", "bfloat16")
    )
    assert whole == 2 * half


def test_a_cache_has_room_for_two_sequences_at_least(tiny_model: Path) -> None:
    spec = EngineSpec(str(tiny_model), max_context_tokens=100, max_running=1)
    assert cache.cache_tokens(spec, 100) >= 200
    assert cache.token_bytes(spec) == TOKEN_BYTES
