"""The token of a private Ray: in a file of this user, and in the environment only while it is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tqppo.run.ray_token import FILE, MODE, TOKEN, TOKEN_PATH, new_token


def test_a_token_is_new_and_private_and_the_environment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "mine")
    monkeypatch.delenv(TOKEN_PATH, raising=False)
    monkeypatch.delenv(MODE, raising=False)
    tokens = set()
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        with new_token(folder):
            assert (os.environ[MODE], os.environ[TOKEN_PATH]) == ("token", str(folder / FILE))
            assert TOKEN not in os.environ  # Ray would take it instead of the file
            assert (folder / FILE).stat().st_mode & 0o777 == 0o600
            tokens.add((folder / FILE).read_text())
        assert os.environ[TOKEN] == "mine"
        assert MODE not in os.environ
        assert TOKEN_PATH not in os.environ
    assert {len(each) for each in tokens} == {64}
    assert len(tokens) == 2


def test_authentication_that_is_switched_off_stays_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "disabled")
    with new_token(tmp_path):
        assert os.environ[MODE] == "disabled"
    assert list(tmp_path.iterdir()) == []
