"""Engines on another node than the trainer's, each in a process of its own for a Ray cluster of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
SCRIPT = Path(__file__).with_name("two_nodes.py")


def run(backend: str, sync: str, timeout_s: float) -> None:
    command = [sys.executable, str(SCRIPT), backend, sync]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all is well" in ended.stdout


@pytest.mark.long
@pytest.mark.slow
def test_the_embedded_engine_on_another_node_gets_a_copy_of_the_weights() -> None:
    run("embedded", "file", 280)


@pytest.mark.engines
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "sync"), [("vllm", "broadcast"), ("sglang", "broadcast"), ("sglang", "file")])
def test_a_server_on_another_node_gets_the_weights_and_gets_them_again_after_its_death(backend: str, sync: str) -> None:
    run(backend, sync, 880)
