"""Conversations: sampled tokens stay, new messages become observations, rewritten history forks."""

from __future__ import annotations

from itertools import compress
from typing import cast

import pytest
from chat_templates import TEMPLATES, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from tqppo.data.dataset import Message
from tqppo.data.prompts import Prompt
from tqppo.protocols import Completion, RolloutEngine, Sampling
from tqppo.rollout.chat import Conversation
from tqppo.rollout.session import Session
from tqppo.rollout.template import ChatTemplate, TemplateRefused, Tokenizer
from tqppo.rollout.tools.calls import Reading, ToolCall
from tqppo.rollout.tools.parsers import hermes
from tqppo.tiny.tokenizer import byte_tokenizer

TINY = ChatTemplate(cast(Tokenizer, byte_tokenizer()))
QUESTION: Message = {"role": "user", "content": "2+2?"}
AGAIN: Message = {"role": "user", "content": "Sure?"}
RESULT: Message = {"role": "tool", "content": "4"}
CALL = '<tool_call>\n{"name":"add","arguments":{"b":2,"a":2}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def prompt(text: str = "2+2") -> Prompt:
    rendered = f"<|user|>{text}<|assistant|>"
    return Prompt("p0", 0, TINY.encode(rendered), "4", "sort", {}, rendered, [{"role": "user", "content": text}])


def sampled(text: str, with_: ChatTemplate = TINY, *, stop: bool = True) -> Completion:
    tokens = with_.encode(text)
    return Completion(tokens, [-0.25] * len(tokens), "stop" if stop else "length", 3)


def test_a_turn_and_a_message_become_one_trajectory_with_the_message_masked_out() -> None:
    talk = Conversation.of(prompt(), TINY)
    assert talk.context() == prompt().tokens
    talk.add_completion(sampled("5<|end|>"))
    talk.add_messages([{"role": "user", "content": "sure?"}])
    assert TINY.decode(talk.context()) == "<|user|>2+2<|assistant|>5<|end|><|user|>sure?<|assistant|>"
    talk.add_completion(sampled("4<|end|>"))
    (found,) = talk.trajectories()
    assert TINY.decode(found.response_tokens) == "5<|end|><|user|>sure?<|assistant|>4<|end|>"
    assert found.response_mask == [True] * 2 + [False] * 7 + [True] * 2
    assert found.logprobs == [-0.25] * 2 + [0.0] * 7 + [-0.25] * 2
    assert (found.num_turns, found.turn_ends, found.finish, found.weight_version) == (2, (2, 11), "stop", 3)


def test_messages_that_no_turn_answers_are_left_out() -> None:
    talk = Conversation.of(prompt(), TINY)
    assert talk.trajectories() == []
    talk.add_completion(sampled("5<|end|>"))
    talk.add_messages([AGAIN])
    talk.context()
    (found,) = talk.trajectories()
    assert TINY.decode(found.response_tokens) == "5<|end|>"


def test_messages_added_after_a_look_at_the_context_are_rendered_together() -> None:
    made = chat("merges_results")
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled(f"{CALL}<|im_end|>", made), hermes(CALL))
    talk.add_messages([RESULT])
    looked = made.decode(talk.context())
    talk.add_messages([RESULT])
    assert made.decode(talk.context()).count("<|im_start|>user") == looked.count("<|im_start|>user") == 2
    assert talk.num_forks == 0


def test_a_turn_that_was_cut_gets_its_end_from_the_template() -> None:
    made = chat("sound")
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled("Fo", made, stop=False))
    talk.add_messages([AGAIN])
    assert made.decode(talk.context()).endswith("assistant\nFo<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
                                                "<|im_start|>assistant\n")  # fmt: skip
    (found,) = talk.trajectories()
    assert found.response_mask == [True, True]
    assert found.finish == "length"


@pytest.mark.parametrize("template", ["turns_without_end", "sound"])
def test_the_token_that_ended_a_turn_stays_whatever_the_template_writes(template: str) -> None:
    made = chat(template)
    talk = Conversation(made, [QUESTION])
    for _ in range(3):
        talk.context()
        talk.add_completion(sampled("Four.<|im_end|>", made))
        talk.add_messages([AGAIN])
    (found,) = talk.trajectories()
    assert made.decode(list(compress(found.response_tokens, found.response_mask))) == "Four.<|im_end|>" * 3
    assert talk.num_forks == 0


def test_a_call_is_written_as_the_model_wrote_it_where_the_template_allows_it() -> None:
    made = chat("sound")
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled(f"{CALL}<|im_end|>", made), Reading("", (ToolCall("add", {"b": 2, "a": 2}),)))
    talk.add_messages([RESULT])
    assert f"assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n4<|im_end|>" in made.decode(talk.context())
    assert talk.num_forks == 0


def test_a_call_that_the_template_writes_in_its_own_way_forks() -> None:
    made = chat("rewrites_calls")
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled(f"{CALL}<|im_end|>", made), hermes(CALL))
    talk.add_messages([RESULT])
    assert '<tool_call>{"arguments":{"b":2,"a":2},"name":"add"}</tool_call>' in made.decode(talk.context())
    talk.add_completion(sampled("Four.<|im_end|>", made))
    first, second = talk.trajectories()
    assert made.decode(first.response_tokens) == f"{CALL}<|im_end|>"
    assert made.decode(second.response_tokens) == "Four.<|im_end|>"
    assert (first.num_turns, second.num_turns) == (1, 1)


def test_thoughts_that_the_template_strips_fork_and_the_shared_beginning_keeps_its_tokens() -> None:
    made = chat("strips_before_last_question")
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled(f"{THOUGHT}Four.<|im_end|>", made))
    talk.add_messages([AGAIN])
    talk.context()
    talk.add_completion(sampled("Yes.<|im_end|>", made))
    first, second = talk.trajectories()
    assert made.decode(first.response_tokens) == f"{THOUGHT}Four.<|im_end|>"
    assert "hm" not in made.decode(second.prompt_tokens)
    assert second.prompt_tokens == made.encode(made.decode(second.prompt_tokens))
    (fork,) = talk.forks
    assert fork.num_turns == 1
    assert "<think>" in fork.seen
    assert "<think>" not in fork.rendered


def test_the_template_s_own_opening_of_a_turn_does_not_fork() -> None:
    made = chat(TEMPLATES["sound"] + "{% if add_generation_prompt %}<think>\n{% endif %}")
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled("hm</think>Four.<|im_end|>", made))
    talk.add_messages([AGAIN])
    assert "assistant\n<think>\nhm</think>Four.<|im_end|>" in made.decode(talk.context())
    assert talk.num_forks == 0


@pytest.mark.parametrize("template", ["refuses_tools", "wants_alternation"])
def test_results_come_from_the_user_where_the_template_has_no_tools(template: str) -> None:
    made = chat(template)
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled(f"{CALL}<|im_end|>", made), hermes(CALL))
    talk.add_messages([RESULT, RESULT])
    response = "<tool_response>\n4\n</tool_response>"
    assert f"<|im_start|>user\n{response}\n{response}<|im_end|>" in made.decode(talk.context())


def test_a_refusal_names_the_roles_and_the_template_s_reason() -> None:
    with pytest.raises(TemplateRefused, match="roles system, user: no system prompts"):
        Conversation(chat("refuses_system"), [{"role": "system", "content": "Be brief."}, QUESTION])


def test_the_date_of_a_conversation_is_that_of_its_beginning() -> None:
    made = chat("inserts_date")
    dated = made.with_options({"strftime_now": lambda _: "31 December 1999"})
    assert "31 December 1999" in dated.render([QUESTION])
    talk = Conversation(made, [QUESTION])
    talk.add_completion(sampled("Four.<|im_end|>", made))
    talk.add_messages([AGAIN])
    assert talk.context()
    assert talk.num_forks == 0


def test_plain_text_has_no_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    made = ChatTemplate(cast(Tokenizer, tokenizer))
    talk = Conversation.of(Prompt("p0", 0, made.encode("2+2="), "4", "s", {}, "2+2="), made)
    talk.add_completion(sampled("5<|end|>"))
    talk.add_messages([{"role": "user", "content": "no, "}])
    assert made.decode(talk.context()) == "2+2=5<|end|>no, "


def test_a_prompt_that_was_cut_stays_cut() -> None:
    cut = prompt("a long question")
    cut = Prompt(**{**{name: getattr(cut, name) for name in cut.__slots__}, "tokens": cut.tokens[-5:]})
    talk = Conversation.of(cut, TINY)
    talk.add_completion(sampled("5<|end|>"))
    talk.add_messages([AGAIN])
    assert talk.context()[:5] == cut.tokens
    assert talk.num_forks == 0


def test_special_tokens_in_other_people_s_text_become_harmless() -> None:
    made = chat("sound")
    assert made.defused("a<|im_end|>b<|im_start|>") == "a< |im_end|>b< |im_start|>"
    assert not set(made.encode(made.defused("<|im_end|><|end|>"))) & set(made.special)


PIECES = st.sampled_from(["Four.", " ", "\n", "<think>", "</think>", CALL, "<tool_call>", "é", "\ufffd", "{}"])
TEXTS = st.lists(PIECES, max_size=4).map("".join)
TURNS = st.lists(st.tuples(TEXTS, st.booleans(), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.sampled_from(sorted(TEMPLATES)), TURNS)
def test_every_sampled_token_is_trained_on_once_after_the_context_that_it_had(
    template: str, turns: list[tuple[str, bool, bool]]
) -> None:
    """Whatever the template does: each turn stands after exactly the tokens that the engine was given for it."""
    made = chat(template)
    talk = Conversation(made, [QUESTION])
    llm = Session(cast(RolloutEngine, None), Sampling(), (0,), (0,), made)
    seen: list[tuple[list[int], Completion]] = []
    for text, ends, calls in turns:
        context = talk.context()
        completion = sampled(text + ("<|im_end|>" if ends else ""), made, stop=ends)
        llm.record.completions.append(completion)
        seen.append((context, completion))
        talk.add_completion(completion, hermes(talk.text_of(completion)) if calls else None)
        talk.add_messages([RESULT] if calls else [AGAIN])
    trajectories = talk.trajectories()
    played = []
    for each in trajectories:
        whole, begin = [*each.prompt_tokens, *each.response_tokens], 0
        for end in each.turn_ends:
            while begin < end and not each.response_mask[begin]:
                begin += 1
            played.append((whole[: len(each.prompt_tokens) + begin], list(each.response_tokens[begin:end])))
            begin = end
    assert played == [(context, completion.tokens) for context, completion in seen]
    assert sum(sum(each.response_mask) for each in trajectories) == sum(len(c.tokens) for _, c in seen)
    assert llm.num_retokenized(trajectories) == 0
    assert talk.num_forks == len(trajectories) - 1
