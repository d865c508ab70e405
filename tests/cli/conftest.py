"""Running the command line as users do: as a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


class Run(Protocol):
    def __call__(self, *arguments: str, environ: dict[str, str] | None = None) -> Answer: ...


@pytest.fixture
def tqppo(tmp_path: Path) -> Run:
    """`tqppo("presets", "list")`: exit code and output, from an empty folder, without a terminal."""

    def run(*arguments: str, environ: dict[str, str] | None = None) -> Answer:
        command = [str(Path(sys.executable).with_name("tqppo")), *arguments]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("TQPPO", "_TQPPO"))}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**clean, "HOME": str(tmp_path), **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run
