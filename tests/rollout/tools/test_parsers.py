from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqppo.errors import ConfigError
from tqppo.rollout.tools.calls import ToolCall
from tqppo.rollout.tools.parsers import PARSERS, hermes, llama3_json, mistral, parser_named, tiny, xml

ADD = ToolCall("add", {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}", "name": "add"}</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": "x"}}'),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": "x"}'),
    ],
)
def test_one_call_in_each_format(parser: str, text: str) -> None:
    assert PARSERS[parser](text).calls == (ADD,)


def test_values_between_tags_stay_text_and_keep_their_lines() -> None:
    call = "<function=run>\n<parameter=code>\nprint(1)\nprint(2)\n</parameter>\n</function>"
    text = f"First.\n<tool_call>\n{call}\n</tool_call>"
    assert xml(text).calls == (ToolCall("run", {"code": "print(1)\nprint(2)"}),)
    assert xml(text).text == "First."


def test_the_short_form_takes_balanced_parentheses() -> None:
    reading = tiny("so @calc((1+2)*3) and @now()!")
    assert reading.calls == (ToolCall("calc", {"": "(1+2)*3"}), ToolCall("now"))
    assert reading.text == "so  and !"
    assert tiny("@calc((1").calls[0].error == "the call has no closing parenthesis"


def test_several_calls_in_order_and_the_text_around_them() -> None:
    first, second = ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})
    calls = [f'{{"name": "add", "arguments": {{"a": {n}}}}}' for n in (1, 2)]
    reading = hermes(f"Let me see.\n<tool_call>{calls[0]}</tool_call>\n<tool_call>{calls[1]}</tool_call>")
    assert (reading.text, reading.calls) == ("Let me see.", (first, second))
    assert llama3_json("; ".join(calls)).calls == (first, second)
    assert mistral(f"[TOOL_CALLS][{', '.join(calls)}]").calls == (first, second)
    assert mistral('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}').calls == (first, second)


CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"<think>I could say {CALL}</think>No.", 0),
        (f"I could say {CALL}</think>No.", 0),  # the template opened the thoughts
        (f"<think>{CALL}", 0),  # the thoughts have no end
        (f"<think>hm</think>{CALL}", 1),
        ("Write </tool_call> after <tool_call", 0),
    ],
)
def test_what_only_looks_like_a_call_is_none(text: str, num_calls: int) -> None:
    assert len(hermes(text).calls) == num_calls


def test_thoughts_stay_in_the_text_of_a_turn_with_calls() -> None:
    assert hermes(f"<think>hm</think>{CALL}").text == "<think>hm</think>"


def test_json_within_a_sentence_is_no_call_of_llama() -> None:
    assert llama3_json('The answer is {"name": "add", "parameters": {}}').calls == ()
    assert llama3_json('{"result": 3}').calls == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{name: add}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add"', "the call has no end"),
        ("<tool_call>[1]</tool_call>", 'an object with "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments are not an object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "the arguments are not valid JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, error: str) -> None:
    (call,) = hermes(text).calls
    assert error in call.error


MARKS = (
    "<tool_call> </tool_call> [TOOL_CALLS] [ARGS] <function= </function> <parameter= <think> </think> <|python_tag|>"
)
PIECES = st.sampled_from([*MARKS.split(), *">{}:[]();1x\x00\ud800", '"name"', "@f("])


@given(st.sampled_from(sorted(PARSERS)), st.lists(PIECES, max_size=30).map("".join))
def test_every_text_is_read(parser: str, text: str) -> None:
    reading = PARSERS[parser](text)
    assert all(call.error or call.name is not None for call in reading.calls)


def test_the_parser_follows_from_the_template() -> None:
    assert parser_named("auto", "{{ '<tool_call>' }}") is hermes
    assert parser_named("auto", "{{ '<tool_call><function=' }}") is xml
    assert parser_named("auto", "[TOOL_CALLS]") is mistral
    assert parser_named("auto", "<|python_tag|>") is llama3_json
    assert parser_named("tiny", "") is tiny
    with pytest.raises(ConfigError, match="choose one of hermes, llama3_json, mistral, xml, tiny"):
        parser_named("auto", "{{ messages }}")
