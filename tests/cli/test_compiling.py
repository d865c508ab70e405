from __future__ import annotations

import pytest

from tqppo.cli.compiling import compile_named, has_errors, print_diagnostics
from tqppo.errors import UsageError


def test_a_command_line_must_name_a_preset_or_a_file() -> None:
    with pytest.raises(UsageError, match="--preset NAME"):
        compile_named(None, [], ["run.seed=1"])


def test_problems_go_to_stderr_and_their_absence_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = compile_named("quickstart", [], ["rollout.group_sise=4"])
    assert has_errors(compiled.diagnostics)
    print_diagnostics(compiled.diagnostics)
    shown = capsys.readouterr()
    assert "group_sise" in shown.err
    assert shown.out == ""
    print_diagnostics([])
    assert capsys.readouterr().err == ""
