"""Names of other tools point at settings that exist."""

from __future__ import annotations

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.read.replacements import REPLACEMENTS, replacement_of
from tqppo.config.schema import settings
from tqppo.config.sections import Config


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_a_name_of_another_tool_is_not_ours_and_says_what_replaces_it(name: str) -> None:
    known = REPLACEMENTS[name]
    assert known.key in settings() or known.key in Config.model_fields or (not known.key and known.hint)
    assert name not in settings()
    (problem,) = [each for each in compile_config(None, [], [f"{name}=1"], {}).diagnostics if each.code == "E102"]
    assert problem.fix


def test_the_longest_known_ending_decides() -> None:
    assert replacement_of(("critic", "optim", "lr")) == REPLACEMENTS["critic.optim.lr"]
    assert replacement_of(("actor_rollout_ref", "actor", "optim", "lr")) == REPLACEMENTS["optim.lr"]
    assert replacement_of(("actor", "ppo-epochs")) == REPLACEMENTS["ppo_epochs"]
    assert replacement_of(("run", "nonsense")) is None
