"""Pytest plugin of the contract suites: `pytest -p tqppo.contracts.plugin --pyargs tqppo.contracts.KIND --backend X`.

`tqppo backends check KIND NAME` runs exactly that. A test file of your own may instead import everything from a suite
and define the `backend_name` fixture itself.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="", metavar="NAME", help="the back end that the contract tests check")


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """Name of the back end under test."""
    name = request.config.getoption("--backend")
    if not name:
        raise pytest.UsageError("--backend NAME is missing: the back end to check")
    return str(name)
