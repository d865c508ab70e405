"""What it takes to add an engine: its module, its entry points, and a run of the contract."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = """
from tqppo_backends.rollout.embedded.engine import EmbeddedRollout


class AcmeRollout(EmbeddedRollout):
    pass
"""
CAPABILITIES = """
from tqppo.protocols import EngineCapabilities

CAPABILITIES = EngineCapabilities(score_top_k=8)
"""
ENTRY_POINTS = """
[tqppo.rollout]
acme = acme.engine:AcmeRollout
[tqppo.capabilities]
acme = acme:CAPABILITIES
"""


@pytest.mark.slow
def test_an_engine_in_a_package_of_its_own_is_found_and_passes_the_contract(tmp_path: Path) -> None:
    info, package = tmp_path / "acme-1.0.dist-info", tmp_path / "acme"
    info.mkdir()
    package.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (package / "__init__.py").write_text(CAPABILITIES)
    (package / "engine.py").write_text(ENGINE)
    command = [sys.executable, "-m", "pytest", "-p", "tqppo.contracts.plugin", "--pyargs", "tqppo.contracts.rollout"]
    command += ["--backend", "acme", "-k", "greedy or loaded_weights or sleep", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
