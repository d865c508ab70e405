"""Every shipped preset, every leaf key: one mistake gives exactly one error, on that key's line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import Span, render_text
from tqppo.config.read.spans import Document, parse
from tqppo.config.schema import setting_of
from tqppo.engines.capabilities import BUILT_IN

FOLDER = Path(__file__).parents[2] / "presets"
PRESETS = sorted(FOLDER.glob("*.toml"))
NAMED = {"rollout.backend", "storage.backend", "rollout.agent", "data.train", "reward.function"}


def leaf_keys(document: Document) -> list[tuple[str, ...]]:
    """Keys with a value that is no table; entries of inline tables are leaves too."""
    paths = [path for path in document.value_spans if all(isinstance(part, str) for part in path)]
    tables = {path[:n] for path in paths for n in range(1, len(path))}
    return [tuple(map(str, path)) for path in paths if path not in tables]


def assert_one_error(path: Path, line: int, what: str) -> None:
    found = compile_config(None, [path], environ={}).diagnostics
    errors = [each for each in found if each.severity == "error"]
    places = [(Path(each.span.source).name, each.span.line) for each in errors if each.span]
    assert (len(errors), places) == (1, [(path.name, line)]), f"{what}\n{render_text(errors)}"


def assert_refused_by_the_command(path: Path, what: str) -> None:
    """`tqppo validate-config` ends with 3 and one error, without a traceback."""
    result = CliRunner().invoke(app, ["validate-config", "--config", str(path), "--format", "json"])
    assert result.exit_code == 3, f"{what}\n{result.output}"
    assert isinstance(result.exception, SystemExit), what
    assert [each["severity"] for each in json.loads(result.stdout)["diagnostics"]].count("error") == 1, what


def replaced(text: str, span: Span, new: str) -> str:
    lines = text.split("\n")
    old = lines[span.line - 1]
    lines[span.line - 1] = old[: span.column - 1] + new + old[span.column - 1 + span.width :]
    return "\n".join(lines)


def typos(name: str) -> list[str]:
    """A letter doubled, dropped, swapped; and a wrong one at the end."""
    found = [name + name[-1], name[:-1] + "q"]
    if len(name) > 4:
        found += [name[1:], name[0] + name[2] + name[1] + name[3:]]
    return [each for each in dict.fromkeys(found) if each != name and re.fullmatch(r"[\w-]+", each)]


@pytest.mark.slow
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_each_mistake_in_a_preset_is_one_error_on_its_line(path: Path, tmp_path: Path) -> None:
    for each in PRESETS:
        (tmp_path / each.name).write_text(each.read_text())
    text = path.read_text()
    document = parse(text, path.name)
    keys = leaf_keys(document)
    assert len(keys) >= 5
    for key in keys:
        if key == ("extends",):
            continue
        for what, mutant, line in mutations(text, document, key):
            (tmp_path / path.name).write_text(mutant)
            assert_one_error(tmp_path / path.name, line, f"{path.name}: {what}")
        assert_refused_by_the_command(tmp_path / path.name, f"{path.name}: {what}")  # the last of each key's mistakes


def mutations(text: str, document: Document, key: tuple[str, ...]) -> list[tuple[str, str, int]]:
    dotted, at = ".".join(key), document.value_spans[key]
    setting = setting_of(dotted)
    assert setting is not None, dotted
    found = []
    free = setting.is_table  # an entry of a free table: any name is allowed, its task may refuse it
    name_span = document.key_spans[key]
    if not free:
        prefix = name_span.text[name_span.column - 1 :][: name_span.width].rpartition(".")[0]
        for typo in typos(key[-1]):
            written = f"{prefix}.{typo}" if prefix else typo
            found.append((f"{dotted} written {typo}", replaced(text, name_span, written), name_span.line))
    wrong = "[[1]]" if "list" in setting.allowed or "string" in setting.allowed else '"wrong"'
    found.append((f"{dotted} = {wrong}", replaced(text, at, wrong), at.line))
    choices = [str(each) for each in setting.choices if isinstance(each, str)]
    if choices or dotted in NAMED or dotted.endswith(".backend"):
        value = f'"{(choices or list(BUILT_IN))[0]}x"'
        found.append((f"{dotted} = {value}", replaced(text, at, value), at.line))
    return found
