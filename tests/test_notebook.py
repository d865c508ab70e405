"""docs/notebook.ipynb: it is shown as it was executed, and every cell of it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(each.get("text", each.get("data", {}).get("text/plain", ""))) for each in cell["outputs"])


def test_the_notebook_is_stored_as_it_was_executed() -> None:
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "finished 2 of 2 steps" in "".join(map(printed, cells))
    assert not [each for cell in cells for each in cell["outputs"] if each["output_type"] == "error"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    target = tmp_path / "executed.ipynb"
    script = ROOT / "tests" / "notebook.py"
    done = subprocess.run([sys.executable, str(script), str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = code_cells(target)
    assert [cell["source"] for cell in cells] == [cell["source"] for cell in code_cells(NOTEBOOK)]
    assert "<Run from-a-notebook: finished, 2 of 2 steps" in "".join(map(printed, cells))
