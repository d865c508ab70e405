from __future__ import annotations

import pytest

from tests.changed import folders_of


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tqppo/queue/blocks/gather.py", "tests/queue/blocks"),
        ("tqppo/space.py", "tests/test_space.py"),
        ("backends/rollout/embedded/kv.py", "tests/backends/rollout/embedded"),
        ("backends/rollout/vllm_guard/tqppo_scores.py", "tests/backends/rollout"),
        ("presets/quickstart.toml", "tests/config"),
        ("tests/rollout/test_slots.py", "tests/rollout/test_slots.py"),
        ("README.md", "tests/test_readme.py"),
    ],
)
def test_a_changed_file_is_tested_by_the_folder_that_mirrors_it(changed: str, tests: str) -> None:
    assert folders_of([changed]) == sorted({tests, "tests/test_house.py"})


def test_the_rules_of_the_house_are_always_tested() -> None:
    assert folders_of([]) == ["tests/test_house.py"]
    assert folders_of(["tests/conftest.py", "tqppo/gone/nowhere.py"]) == ["tests/test_house.py"]
