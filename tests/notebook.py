"""Executes docs/notebook.ipynb: `python tests/notebook.py` writes its outputs anew, with a file as argument there.

It runs in a process of its own, because the notebook's kernel has its own event loop and warnings.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
TIMEOUT_S = 240


def execute(target: Path) -> None:
    """Run all cells in an empty folder; an error in a cell is an error here."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times: the file shall change with its content only
        # Libraries warn that widgets are missing, with paths of this machine.
        cell["outputs"] = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
        if cell.cell_type != "code":
            del cell["outputs"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, target)


if __name__ == "__main__":
    execute(Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK)
