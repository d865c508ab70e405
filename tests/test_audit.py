"""The audit: findings fail, an index without the data does not."""

from __future__ import annotations

import json

from audit import audited, verdict


def report(*packages: dict[str, object]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_a_known_vulnerability_is_named_and_fails() -> None:
    vulnerable = {"id": "GHSA-1", "fix_versions": ["1.1"], "aliases": [], "description": "…"}
    said = report({"name": "a", "version": "1.0", "vulns": [vulnerable]}, {"name": "b", "version": "2", "vulns": []})
    assert verdict(said, "") == (
        False,
        "a 1.0: GHSA-1, fixed in 1.1\n2 packages audited, 1 known vulnerabilities",
    )


def test_sound_versions_pass_and_a_package_that_the_index_does_not_know_is_not_counted() -> None:
    said = report({"name": "a", "version": "1.0", "vulns": []}, {"name": "own", "skip_reason": "not on the index"})
    assert verdict(said, "") == (True, "1 packages audited, no known vulnerabilities")


def test_without_data_nothing_is_claimed() -> None:
    for output in ("", "<html>", "[]", report({"name": "own", "skip_reason": "not on the index"})):
        is_sound, said = verdict(output, "could not connect")
        assert is_sound is None
        assert said.startswith("not audited")
    assert audited(["/nowhere/pip-audit"])[0] == ""
