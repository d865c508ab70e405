from __future__ import annotations

import pytest

from tests.changed import ALL, folders_of


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tqppo/queue/blocks/gather.py", "tests/queue/blocks"),
        ("tqppo/config/facts.py", "tests/run"),  # it imports facts
        ("tqppo/config/facts.py", "tests/config"),
        ("backends/rollout/embedded/kv.py", "tests/backends/rollout/embedded"),
        ("backends/rollout/vllm_guard/tqppo_scores.py", "tests/backends/rollout"),
        ("presets/quickstart.toml", "tests/config"),
        ("tests/rollout/test_slots.py", "tests/rollout/test_slots.py"),
        ("README.md", "tests/test_readme.py"),
    ],
)
def test_a_file_is_tested_by_its_own_folder_and_those_of_its_importers(changed: str, tests: str) -> None:
    assert {tests, "tests/test_house.py"} <= set(folders_of([changed]))


@pytest.mark.parametrize("changed", ["tqppo/dataflow.py", "tqppo/errors.py", "pyproject.toml", "tests/scripted.py"])
def test_what_all_rooms_use_is_tested_by_all_of_them(changed: str) -> None:
    assert folders_of([changed]) == ALL


def test_the_rules_of_the_house_are_always_tested() -> None:
    assert folders_of([]) == folders_of(["LICENSE"]) == ["tests/test_house.py"]
