"""Functions with verl's and TRL's signatures, alone and in batches; several functions with weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tqppo.errors import DataError
from tqppo.rewards.calls import RewardCall, signature_of
from tqppo.rewards.scorer import Reward, Scorer, ScorerSpec

PLAIN = {"source": "s", "solution": "4", "answer": "4", "extra": {"level": 2}, "prompt": "2+2?"}
CHAT = {**PLAIN, "prompt": [{"role": "user", "content": "2+2?"}]}


def test_a_function_of_trl_gets_prompts_completions_and_columns() -> None:
    seen: list[object] = []

    def grade(prompts: list[object], completions: list[object], solution: list[str], **columns: object) -> list[float]:
        seen.append((prompts, completions, solution, columns["level"]))
        return [1.0] * len(prompts)

    call = RewardCall("grade", grade)
    assert (call.signature, call.is_batch) == ("TRL", True)
    assert call.many([PLAIN, PLAIN]) == [1.0, 1.0]
    assert call.one(CHAT) == 1.0
    assert seen[0] == (["2+2?"] * 2, ["4", "4"], ["4", "4"], [2, 2])
    assert seen[1] == ([CHAT["prompt"]], [[{"role": "assistant", "content": "4"}]], ["4"], [2])


def test_a_column_that_rows_lack_is_named() -> None:
    def grade(completions: list[str], tests: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(DataError, match="asks for column 'tests', and rows have answer, solution"):
        RewardCall("grade", grade).one(PLAIN)


def test_a_batch_function_of_verl_gets_lists() -> None:
    def grade(
        data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[object]
    ) -> list[float]:
        return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]

    assert signature_of(grade) == "verl batch"
    assert RewardCall("grade", grade).many([PLAIN, {**PLAIN, "answer": "5"}]) == [1.0, 0.0]


def test_a_function_of_verl_gets_the_whole_conversation_if_it_asks_for_it() -> None:
    def grade(
        data_source: str, solution_str: str, ground_truth: str, extra_info: object, messages: list[object]
    ) -> float:
        return len(messages)

    assert RewardCall("grade", grade).one(CHAT) == 2
    assert not RewardCall("grade", grade).wants_transcript


def test_an_object_with_an_async_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, completions: list[str], **columns: object) -> list[float]:
            await asyncio.sleep(0)
            return [0.5 for _ in completions]

    call = RewardCall("judge", Judge())
    assert call.is_async
    assert asyncio.run(call.one_async(PLAIN)) == 0.5


def test_a_list_of_the_wrong_length_is_refused() -> None:
    def grade(completions: list[str]) -> list[float]:
        return [1.0, 1.0]

    with pytest.raises(DataError, match="a list of 1 scores"):
        RewardCall("grade", grade).one(PLAIN)


def test_several_functions_add_up_by_weight_and_each_is_a_metric(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def short(completions, **columns):\n    return [1.0 if len(each) < 5 else None for each in completions]\n"
    )
    spec = ScorerSpec(
        function=["exact_match", f"{tmp_path}/mine.py:short"],
        weights=[1.0, 0.25],
        function_args={"exact_match": {"ignore_case": True}},
    )
    scorer = Scorer(spec)
    try:
        right = asyncio.run(scorer.score("s", "Yes", "yes"))
        long = asyncio.run(scorer.score("s", "absolutely", "yes"))
    finally:
        scorer.close()
    assert right == Reward(1.25, {"exact_match": 1.0, "acc": 1.0, "short": 1.0}, "Yes")
    assert long == Reward(0.0, {"exact_match": 0.0, "acc": 0.0}, "absolutely")


def test_arguments_of_several_functions_are_given_by_name() -> None:
    with pytest.raises(DataError, match=r"a table for each: function_args = \{ exact_match"):
        Scorer(ScorerSpec(function=["exact_match", "gsm8k"], function_args={"ignore_case": True}))
    with pytest.raises(DataError, match="1 weights for 2 functions"):
        Scorer(ScorerSpec(function=["exact_match", "gsm8k"], weights=[1.0]))
