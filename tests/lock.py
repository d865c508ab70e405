"""Writes requirements-locked.txt: the versions of constraints.txt with the hashes of the files that pip chooses here.

pip names the one file that fits this platform, so the lock is of one platform; the first line says which. Run it again
when constraints.txt changes: `make lock`.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = "setuptools>=77"  # of pyproject.toml; `make env-locked` builds without an environment of pip's own
ROOT = Path(__file__).parents[1]
LOCKED = ROOT / "requirements-locked.txt"


def chosen_files(constraints: Path) -> dict[str, object]:
    """pip's report of what it would install: every version of the constraints, without dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*command, "--report", str(report), "--requirement", str(constraints), BUILD], check=True)
        read: dict[str, object] = json.loads(report.read_text())
    return read


def locked(report: dict[str, object], where: str) -> str:
    """The lines of the lock, sorted by name. ValueError if a file has no hash."""
    lines = []
    files = report["install"]
    assert isinstance(files, list)
    for each in files:
        named, hashes = each["metadata"], each["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" not in hashes:
            raise ValueError(f"pip gives no hash for {named['name']}")
        lines.append(f"{canonical(named['name'])}=={named['version']} --hash=sha256:{hashes['sha256']}\n")
    return f"# {where}; `make lock` writes this file, `make env-locked` installs it.\n" + "".join(sorted(lines))


def canonical(name: str) -> str:
    """The one spelling of a package's name, which pip takes for all of them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def this_platform() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version().rpartition('.')[0]}"


if __name__ == "__main__":
    LOCKED.write_text(locked(chosen_files(ROOT / "constraints.txt"), this_platform()))
