"""Each assignment on its own: unknown keys, wrong values, and which keys are unresolved afterwards."""

from __future__ import annotations

import pytest

from tqppo.config.read.assignment import KeyAssignment, SettingsLayer
from tqppo.config.read.flatten import assignments_of
from tqppo.config.read.overrides import override_layer
from tqppo.config.read.spans import parse
from tqppo.config.read.unknown_key import unknown_key
from tqppo.config.read.validate import AssignmentValidator
from tqppo.config.read.wrong_value import conversion
from tqppo.config.schema import settings


def assignment(text: str) -> KeyAssignment:
    (one,) = override_layer([text])[0].assignments
    return one


def validated(*sets: str) -> tuple[dict[str, object], AssignmentValidator]:
    validator = AssignmentValidator()
    return {one.key: one.value for one in validator.valid(override_layer(sets)[0])}, validator


def test_a_table_is_taken_apart_into_settings() -> None:
    values, validator = validated("actor={lr = 1e-3, epochs = 2}", "data.task_args={digits = 5}")
    assert values == {"actor.lr": 1e-3, "actor.epochs": 2, "data.task_args.digits": 5}
    assert not validator.problems


def test_an_invalid_value_is_left_out_and_its_key_unresolved() -> None:
    values, validator = validated("actor.lr=fast", "actor.epochs=2")
    assert values == {"actor.epochs": 2}
    assert [each.code for each in validator.problems] == ["E103"]
    assert validator.unresolved == {"actor.lr"}


def test_an_unquoted_number_is_text_where_only_text_is_accepted() -> None:
    assert validated("run.name=42")[0] == {"run.name": "42"}


@pytest.mark.parametrize(
    ("text", "code", "meant"),
    [
        ("actor.lrr=1", "E101", "actor.lr"),
        ("data.group_size=4", "E101", "rollout.group_size"),
        ("rolout.group_size=4", "E101", "rollout.*"),
        ("rollout.n=8", "E102", "rollout.group_size"),
        ("critic.learning_rate=1", "E102", "critic.lr"),
    ],
)
def test_an_unknown_key_leaves_the_key_that_was_meant_unresolved(text: str, code: str, meant: str) -> None:
    found = unknown_key(assignment(text))
    assert found.problem.code == code
    assert meant in found.meant


def test_a_broken_file_leaves_every_key_unresolved() -> None:
    document = parse("[actor]\nlr = \nepochs = 2\n", "x.toml")
    validator = AssignmentValidator()
    assert [one.key for one in validator.valid(SettingsLayer("config", "x.toml", document))] == ["actor.epochs"]
    assert validator.unresolved == {"*"}


def test_an_unknown_section_yields_the_keys_that_other_tools_have() -> None:
    document = parse("[actor_rollout_ref.rollout]\nn = 8\nmine = 1\n[run]\nseed = 3\n", "x.toml")
    keys = [one.key for one in assignments_of(document)]
    assert keys == ["actor_rollout_ref", "actor_rollout_ref.rollout.n", "run.seed"]


@pytest.mark.parametrize(
    ("value", "key", "fix"),
    [
        ("true", "data.shuffle", "write true, without quotes"),
        ("1e-3", "actor.lr", "write 1e-3, without quotes"),
        (2.0, "actor.epochs", "write 2"),
        (3, "run.name", 'write "3", in quotes'),
        ("all", "model.lora_targets", 'write ["all"]'),
    ],
)
def test_a_value_of_the_wrong_type_comes_with_the_right_spelling(value: object, key: str, fix: str) -> None:
    assert conversion(value, settings()[key]) == fix
