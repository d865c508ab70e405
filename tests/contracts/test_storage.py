"""The storage contract on our storages."""

from __future__ import annotations

import pytest

from tqppo.contracts.storage import *  # noqa: F403


@pytest.fixture(scope="module", params=["simple", "ray", pytest.param("transferqueue", marks=pytest.mark.slow)])
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def cluster(local_ray: None) -> None:
    """The test run's own Ray."""
