"""The contract of every engine, kept by a real vLLM, on a Llama-style model with a tied head."""

from __future__ import annotations

import pytest

from tqppo.contracts.rollout import *

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "vllm"
