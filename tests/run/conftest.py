"""A rehearsal: whole runs without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run.rehearsal import Rehearsal, no_cluster

from tqppo.run import launch


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    made = Rehearsal(tmp_path / "runs")
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(launch, "ray_cluster", no_cluster)
    return made
