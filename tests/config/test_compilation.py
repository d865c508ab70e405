"""The result of a compilation: which layers set a key."""

from __future__ import annotations

from tqppo.config.compilation import Compilation, Origin
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.sections import Config

FILE, ARGUMENT = Origin(3, "config", "a.toml:2:1", 0), Origin(4, "set", "--set x=4", 1)


def test_a_chain_is_that_of_the_key_or_of_the_entries_of_its_table() -> None:
    origins = {"actor.epochs": (FILE, ARGUMENT), "data.task_args.digits": (ARGUMENT,)}
    compilation = Compilation(Config(), [], origins)
    assert compilation.chain("actor.epochs") == (FILE, ARGUMENT)
    assert compilation.chain("data.task_args") == (ARGUMENT,)
    assert compilation.chain("actor.lr") == ()


def test_only_errors_make_a_config_unusable() -> None:
    warning, error = Diagnostic("warning", "W008", "empty"), Diagnostic("error", "E101", "unknown")
    assert Compilation(Config(), [warning], {}).config == Config()
    assert Compilation(Config(), [warning, error], {}).config is None


def test_an_origin_is_shown_by_its_place() -> None:
    assert str(FILE) == "a.toml:2:1"
    assert str(Origin(1, "default", "default", -1)) == "default"
    assert ARGUMENT.as_dict() == {"value": 4, "kind": "set", "place": "--set x=4"}
