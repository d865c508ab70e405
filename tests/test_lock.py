"""The lock: every version that pip chooses with the hash of its file."""

from __future__ import annotations

import re

import pytest
from lock import BUILD, LOCKED, ROOT, canonical, locked


def described(name: str, **archive: object) -> dict[str, object]:
    return {"metadata": {"name": name, "version": "1.0"}, "download_info": {"url": "…", "archive_info": archive}}


def test_a_lock_has_a_line_per_file_in_the_order_of_names() -> None:
    report = {"install": [described("B", hashes={"sha256": "22"}), described("a", hashes={"sha256": "11"})]}
    assert locked(report, "here").splitlines()[1:] == ["a==1.0 --hash=sha256:11", "b==1.0 --hash=sha256:22"]


def test_a_file_without_a_hash_is_not_locked() -> None:
    with pytest.raises(ValueError, match="no hash for a"):
        locked({"install": [described("a")]}, "here")


def test_the_lock_has_the_versions_that_were_tested() -> None:
    tested = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    wanted = {
        (canonical(name), version) for name, _, version in (line.partition(" ;")[0].partition("==") for line in tested)
    }
    lines = LOCKED.read_text().splitlines()[1:]
    files = [line.partition(" ")[0].partition("==") for line in lines]
    found = {(name, version.partition("+")[0]) for name, _, version in files}  # after a +: the build of torch
    (builder,) = found - wanted
    assert builder[0] == canonical(BUILD.partition(">")[0])
    assert found >= wanted, "constraints.txt has changed: make lock"
    assert all(re.fullmatch(r"\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
