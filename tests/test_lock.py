"""The lock: every version that pip chooses with the hash of its file."""

from __future__ import annotations

import pytest
from lock import locked


def described(name: str, **archive: object) -> dict[str, object]:
    return {"metadata": {"name": name, "version": "1.0"}, "download_info": {"url": "…", "archive_info": archive}}


def test_a_lock_has_a_line_per_file_in_the_order_of_names() -> None:
    report = {"install": [described("B", hashes={"sha256": "22"}), described("a", hashes={"sha256": "11"})]}
    assert locked(report, "here").splitlines()[1:] == ["a==1.0 --hash=sha256:11", "b==1.0 --hash=sha256:22"]


def test_a_file_without_a_hash_is_not_locked() -> None:
    with pytest.raises(ValueError, match="no hash for a"):
        locked({"install": [described("a")]}, "here")
