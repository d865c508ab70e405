from __future__ import annotations

from pathlib import Path

import pytest

from tqppo import plugins


def test_a_user_s_object_comes_from_a_file_with_its_neighbours_or_from_a_module(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_test.py").write_text("VALUE = 3\n")
    (tmp_path / "own_of_test.py").write_text("from neighbour_of_test import VALUE\n")
    assert plugins.import_own(f"{tmp_path}/own_of_test.py:VALUE") == 3
    assert plugins.import_own(f"{tmp_path}/own_of_test.py:missing") is None
    assert plugins.import_own("tqppo.plugins:import_own") is plugins.import_own
    with pytest.raises(ImportError, match=r"there is no file /nowhere/own\.py"):
        plugins.import_own("/nowhere/own.py:f")


def test_files_get_their_full_path_and_modules_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plugins.absolute("own.py:f") == f"{tmp_path}/own.py:f"
    assert plugins.absolute("package.module:f") == "package.module:f"
    assert plugins.absolute("single_turn") == "single_turn"
