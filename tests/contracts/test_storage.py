"""The storage contract on every storage that is installed."""

from __future__ import annotations

import pytest

from tqppo import plugins
from tqppo.contracts.storage import *  # noqa: F403

SLOW = {"transferqueue"}  # a call takes milliseconds
NAMES = [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in plugins.names("storage")]


@pytest.fixture(scope="module", params=NAMES)
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> None:
    """The test run's own Ray."""
