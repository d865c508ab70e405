"""Loading of the embedded engine's model."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tqppo.protocols import EngineSpec

model = importlib.import_module("tqppo_backends.rollout.embedded.model")


def test_two_engines_of_one_process_load_one_after_the_other(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` skips the initialisation of weights for the whole process while it loads."""
    real, loading, most = model.AutoModelForCausalLM.from_pretrained, [], 0

    def slow(*args: Any, **named: Any) -> Any:
        nonlocal most
        loading.append(1)
        most = max(most, len(loading))
        time.sleep(0.05)
        try:
            return real(*args, **named)
        finally:
            loading.pop()

    monkeypatch.setattr(model.AutoModelForCausalLM, "from_pretrained", slow)
    spec = EngineSpec(str(tiny_model), max_context_tokens=32)
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(model.load_model, [spec] * 3))
    assert most == 1
    assert not any(parameter.is_meta for each in made for parameter in each.parameters())
