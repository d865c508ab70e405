"""Every setting as data: documentation, what it accepts, and that something reads it."""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import tqppo
from tqppo.algorithms.advantages import EstimateOptions
from tqppo.algorithms.losses import PolicyOptions
from tqppo.config.schema import describe, section_of, setting_of, settings
from tqppo.data.prompts import DataSpec
from tqppo.rewards.scorer import ScorerSpec

PACKAGE = Path(tqppo.__file__).parent
READ_BY_FIELD = {  # dataclasses whose fields are filled from the settings of the same names
    "data": (DataSpec,),
    "reward": (ScorerSpec,),
    "algorithm": (EstimateOptions, PolicyOptions),
}

# Settings that only checks and plan read: placement leaves nodes to Ray, and vocabularies are compared before a run.
UNREAD = {"cluster.nodes", "cluster.gpu_memory_gb", "distillation.nodes", "distillation.check_vocabulary"}


@cache
def readers() -> dict[Path, set[str]]:
    """The attribute names in each file outside the config's own reading and checking, and in what derives facts."""
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "config" not in path.parents]
    found = {}
    for path in [*files, *(PACKAGE / "config" / name for name in ("facts.py", "placement.py"))]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[path] = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found[path] |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found


@pytest.mark.parametrize("key", settings())
def test_every_setting_is_documented_in_a_sentence(key: str) -> None:
    doc = settings()[key].doc
    assert len(doc) >= 10
    assert doc.endswith(".")


@pytest.mark.parametrize("key", settings())
def test_every_setting_is_read_by_the_run(key: str) -> None:
    section, _, name = key.rpartition(".")
    if key in UNREAD:
        return
    if any(name == field.name for spec in READ_BY_FIELD.get(section, ()) for field in fields(spec)):
        return
    kinds = {section.removesuffix(".*"), *(kind.__name__ for kind in (section_of(section) or object).__mro__[:2])}
    assert any(name in attributes and (not section or kinds & attributes) for attributes in readers().values()), (
        f"nothing outside the config's checks reads {key}"
    )


def test_a_concrete_key_finds_its_setting() -> None:
    assert setting_of("teachers.math.path") is settings()["teachers.*.path"]
    assert setting_of("data.task_args.digits") is settings()["data.task_args"]
    assert setting_of("mode") is settings()["mode"]
    assert setting_of("actor.lrr") is None


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (list[str], "a list of strings"),
        (str | list[str], "a string or a list of strings"),
        (dict[str, int], "a table of a whole number"),
    ],
)
def test_types_are_described_in_words(annotation: object, words: str) -> None:
    assert describe(annotation) == words


def test_ranges_and_choices_are_described() -> None:
    assert settings()["rollout.top_p"].allowed == "a number, above 0, at most 1"
    assert settings()["algorithm.kl_controller"].allowed == 'one of "fixed", "adaptive"'


def test_an_unquoted_number_is_text_only_where_text_is_the_only_choice() -> None:
    assert settings()["run.name"].takes_only_text
    assert settings()["model.dtype"].takes_only_text
    assert not settings()["data.train"].takes_only_text
    assert not settings()["run.seed"].takes_only_text
