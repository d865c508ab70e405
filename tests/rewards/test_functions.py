from __future__ import annotations

import pytest

from tqppo.errors import DataError
from tqppo.rewards.functions import BUILT_IN, INLINE, exact_match, gsm8k, gym, matches, own_reward, partial_match


def test_every_function_returns_a_score_accuracy_and_the_answer_it_read() -> None:
    assert exact_match("s", " 12 ", 12) == {"score": 1.0, "acc": 1.0, "pred": "12"}
    assert partial_match("s", "1243", "1234") == {"score": 0.5, "acc": 0.0, "pred": "1243"}
    assert gsm8k("s", "so 1,000.", "#### 1000") == {"score": 1.0, "acc": 1.0, "pred": "1000"}
    assert matches("s", "a\nb", "", pattern="a.b")["score"] == 1.0


def test_wrong_arguments_say_what_to_write() -> None:
    with pytest.raises(DataError, match='use "strict" or "flexible"'):
        gsm8k("s", "1", "1", method="loose")
    with pytest.raises(DataError, match="is not a regular expression"):
        matches("s", "1", "1", pattern="(")


def test_gym_refuses_rows_of_other_sources() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match="rows of gym:NAME only"):
        gym("s", "1", "1", {})


@pytest.mark.parametrize(
    ("extra", "name"), [(None, "exact_match"), ({"reward": "gym"}, "gym"), ({"reward": "rm -rf"}, "exact_match")]
)
def test_a_row_names_one_of_the_functions_made_for_rows(extra: dict[str, object] | None, name: str) -> None:
    assert own_reward(extra) == name


def test_functions_that_run_inline_are_built_in() -> None:
    assert set(BUILT_IN) > INLINE
