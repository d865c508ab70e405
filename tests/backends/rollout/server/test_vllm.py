"""A real vLLM: the contract of every engine, and faults. Llama-style with a tied head, Qwen2-style without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.rollout.server.real_servers import *  # noqa: F403
from tqppo.contracts.rollout import *  # noqa: F403

from tests.backends.rollout.server.real_servers import sender, subject, untied_subject  # noqa: F401  isort: skip  (they replace the suite's own)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "vllm"


@pytest.fixture(scope="session")
def untied_model() -> dict[str, Any]:
    return {"family": "qwen2"}


@pytest.fixture(scope="session")
def control_route() -> str:
    return "/weight_info"
