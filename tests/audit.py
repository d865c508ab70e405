"""Compares the tested versions with the known vulnerabilities of the package index: `make audit`.

Exits with 1 for a vulnerability. Where the data cannot be had (no network, an index without it) it says so and exits
with 0, or with 1 if TQPPO_AUDIT=required.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
MOST_S = 600


def audited(command: list[str]) -> tuple[str, str]:
    """What the command wrote to its output and its error output; the first is empty if it could not be run."""
    options = ["--disable-pip", "--no-deps", "--progress-spinner", "off", "--format", "json"]
    try:
        done = subprocess.run(
            [*command, *options, "--requirement", str(CONSTRAINTS)], capture_output=True, text=True, timeout=MOST_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, done.stderr


def verdict(output: str, errors: str) -> tuple[bool | None, str]:
    """Whether the versions are without a known vulnerability, and what to print; None without data."""
    try:
        packages = json.loads(output)["dependencies"]
        found = [f"{each['name']} {each['version']}: {vuln['id']}, fixed in {', '.join(vuln['fix_versions']) or 'none'}"
                 for each in packages for vuln in each.get("vulns", [])]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None, f"not audited, the data cannot be had: {' '.join(errors.split())[-300:]}"
    known = sum("vulns" in each for each in packages)
    if not known:
        return None, "not audited: the index knows none of the packages"
    return not found, "\n".join([*found, f"{known} packages audited, {len(found) or 'no'} known vulnerabilities"])


if __name__ == "__main__":
    is_sound, text = verdict(*audited(sys.argv[1:]))
    print(text)
    sys.exit(is_sound is False or (is_sound is None and os.environ.get("TQPPO_AUDIT") == "required"))
