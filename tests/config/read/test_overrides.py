"""`--set` arguments and environment variables become assignments with their places."""

from __future__ import annotations

import pytest

from tqppo.config.read.overrides import environment_layer, override_layer, read_value


@pytest.mark.parametrize(
    ("raw", "value", "unquoted"),
    [
        ("3", 3, "3"),
        (" 1e-4 ", 1e-4, "1e-4"),
        ('"3"', "3", None),
        ("[1, 2]", [1, 2], None),
        ("vllm", "vllm", "vllm"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
    ],
)
def test_a_value_is_toml_or_else_text(raw: str, value: object, unquoted: str | None) -> None:
    assert read_value(raw) == (value, unquoted)


def test_an_argument_has_places_for_key_and_value() -> None:
    layer, problems = override_layer(["actor.lr= 1e-3", "no-equals"])
    (one,) = layer.assignments
    assert (one.key, one.value) == ("actor.lr", 1e-3)
    assert (one.key_span.column, one.key_span.width) == (1, 8)
    assert (one.value_span.column, one.value_span.width) == (11, 4)
    assert [(each.code, each.span.line if each.span else 0) for each in problems] == [("E012", 2)]


def test_a_variable_is_split_at_double_underscores_whatever_its_case() -> None:
    layer = environment_layer({"tqppo__actor__lr": "1e-3", "TQPPO__DATA__TASK_ARGS__digits": "5", "HOME": "/root"})
    assert {one.key: one.value for one in layer.assignments} == {"actor.lr": 1e-3, "data.task_args.digits": 5}


def test_a_variable_of_an_unknown_section_is_kept_to_be_reported() -> None:
    (one,) = environment_layer({"TQPPO__NONSENSE__KEY": "1"}).assignments
    assert one.key == "nonsense.key"
