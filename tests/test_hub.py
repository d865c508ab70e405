"""A hub name on a machine without network: the cache is used at once, instead of after five attempts for each file."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tqppo import hub


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_without_an_answer_this_process_and_its_children_keep_to_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    hub.use_cache_without_network(["tiny", "org/name"])
    assert (os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE) == ("1", True)
    assert "cannot be reached" in caplog.text


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", server)
    hub.use_cache_without_network(["org/name"])
    assert not constants.HF_HUB_OFFLINE


def test_only_names_of_the_hub_and_direct_connections_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    hub.use_cache_without_network(["tiny", str(tmp_path), "./mine", "~/mine"])
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    hub.use_cache_without_network(["org/name"])
    assert not constants.HF_HUB_OFFLINE
