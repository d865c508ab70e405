"""What the compiler says about each mistake, word for word, in tests/golden.

After a change of wording: TQPPO_GOLDEN=write pytest tests/config/test_golden.py, then read the difference.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Case

from tqppo.config.compile import Compilation, compile_config
from tqppo.config.diagnostics import render_text

GOLDEN = Path(__file__).parents[1] / "golden"


def compiled(case: Case, folder: Path) -> Compilation:
    for name, content in {"run.toml": case.run, **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    default = ("run.toml",) if case.run else ()
    return compile_config(case.preset, default if case.config is None else case.config, case.sets, case.environ)


@pytest.mark.parametrize("name", CASES)
def test_message_reads_as_it_was_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = render_text(compiled(CASES[name], tmp_path).diagnostics)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("TQPPO_GOLDEN") == "write":
        golden.write_text(said, encoding="utf-8")
    assert said == golden.read_text(encoding="utf-8")


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)
