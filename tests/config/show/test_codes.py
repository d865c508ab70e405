"""Every diagnostic code has an entry, in the command and on the page."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.config.show.codes import MEANINGS, page, sections

ROOT = Path(__file__).parents[3]


def test_every_code_that_can_be_reported_is_explained_and_no_other() -> None:
    sources = [path for path in (ROOT / "tqppo").rglob("*.py") if path.name != "codes.py"]
    used = {code for path in sources for code in re.findall(r'"([EW]\d{3})"', path.read_text())}
    assert used - set(MEANINGS) == set()
    assert set(MEANINGS) - used == set()
    assert sorted(code for codes in sections().values() for code in codes) == sorted(MEANINGS)


def test_the_page_is_what_the_command_prints() -> None:
    assert (ROOT / "docs" / "troubleshooting.md").read_text() == page()
    assert CliRunner().invoke(app, ["explain", "--all"]).output == page()


def test_one_code_is_explained_and_an_unknown_one_is_refused() -> None:
    assert CliRunner().invoke(app, ["explain", "e104"]).output.startswith("E104: The value is none of those")
    result = CliRunner().invoke(app, ["explain", "E999"])
    assert result.exit_code == 2
    assert "there is no diagnostic E999" in result.output
