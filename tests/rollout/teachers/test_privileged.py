"""A teacher's own prompt contains what the template says, and the student's answer follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tqppo.data.prompts import Prompt
from tqppo.errors import DataError
from tqppo.rollout.teachers.privileged import before_response, filled_in, own_prompt
from tqppo.rollout.template import ChatTemplate


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def asked(**changes: Any) -> Prompt:
    chat: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "sort 3 1 {2}"},
    ]
    fields: dict[str, Any] = {"answer": "1 2 3", "extra": {"hint": {"first": 1}}, "messages": chat, **changes}
    return Prompt("p", 0, [7, 8, 9], fields["answer"], "sort", fields["extra"], "sort 3 1 2", fields["messages"])


def test_braces_name_the_prompt_the_answer_and_columns() -> None:
    template = "{prompt}\nReference: {answer}, first {hint.first}, {{kept}}"
    assert filled_in(template, asked(), "sort {2}") == "sort {2}\nReference: 1 2 3, first 1, {kept}"


def test_a_column_that_the_row_lacks_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"asks for \{solution\}"):
        filled_in("{prompt} {solution}", asked(), "sort")


def test_the_last_message_of_the_user_is_replaced_and_the_others_stay(tokenizer: Any) -> None:
    tokens = own_prompt("{prompt} = {answer}", asked(), ChatTemplate(tokenizer), is_chat=True)
    text = tokenizer.decode(tokens)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "sort 3 1 {2} = 1 2 3"}]
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_without_a_chat_template_the_text_is_filled_in(tokenizer: Any) -> None:
    tokens = own_prompt("{prompt} = {answer}", asked(), ChatTemplate(tokenizer), is_chat=False)
    assert tokens == tokenizer("sort 3 1 2 = 1 2 3")["input_ids"]


def test_what_followed_the_question_in_a_later_turn_follows_the_teachers_prompt_too() -> None:
    assert before_response([1, 2], asked(), [7, 8, 9]) == (1, 2)
    assert before_response([1, 2], asked(), [7, 8, 9, 5, 6]) == (1, 2, 5, 6)


def test_a_trajectory_that_does_not_begin_with_the_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="does not begin with the prompt"):
        before_response([1, 2], asked(), [8, 9, 5, 6])
