"""Names that users import from `tqppo` itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tqppo


@pytest.mark.parametrize("name", tqppo.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(tqppo, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(tqppo.__file__).read_text())
    seen = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {"annotations", "TYPE_CHECKING"} == set(tqppo.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Qeue'"):
        _ = tqppo.Qeue  # type: ignore[attr-defined]


def test_importing_tqppo_loads_nothing() -> None:
    code = "import sys, tqppo; print([name for name in ('torch', 'ray', 'pydantic', 'rich') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_preset_compiles_from_python() -> None:
    compilation = tqppo.compile_config("quickstart", overrides=["run.max_steps=5"], environ={})
    assert compilation.config is not None
    assert compilation.config.run.max_steps == 5


def test_python_m_tqppo_is_the_command() -> None:
    from tqppo import __main__ as main
    from tqppo.cli import app

    assert main.app is app
    done = subprocess.run([sys.executable, "-m", "tqppo", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tqppo ")
