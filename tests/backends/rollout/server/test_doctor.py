"""`tqppo doctor logprobs` on the genuine engines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_genuine_engine_samples_from_the_trainers_distribution(backend: str) -> None:
    chosen = ["--preset", "quickstart", "--set", f"rollout.backend={backend}", "--prompts", "16", "--json"]
    command = [sys.executable, "-c", "from tqppo.cli import app; app()", "doctor", "logprobs", *chosen]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["num_sequences"] == 16
    assert found["max_abs"] < 1e-4
    assert found["pearson"] > 0.999999
    assert found["correction"] == "none"
    assert f"starting the {backend} engine" in ended.stderr
