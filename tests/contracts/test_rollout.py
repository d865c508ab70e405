"""The engine contract on our embedded engine."""

from __future__ import annotations

import pytest

from tqppo.contracts.rollout import *  # noqa: F403


@pytest.fixture(scope="session")
def backend_name() -> str:
    return "embedded"
