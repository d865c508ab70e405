"""Conversations: sampled tokens stay, new messages become observations, rewritten history forks."""

from __future__ import annotations

from typing import cast

from tqppo.data.prompts import Prompt
from tqppo.protocols import Completion
from tqppo.rollout.chat import Conversation
from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.rollout.tools.calls import Reading, ToolCall
from tqppo.tiny.model import byte_tokenizer

TINY = ChatTemplate(cast(Tokenizer, byte_tokenizer()))


def prompt(text: str = "2+2") -> Prompt:
    rendered = f"<|user|>{text}<|assistant|>"
    return Prompt("p0", 0, TINY.encode(rendered), "4", "sort", {}, rendered, [{"role": "user", "content": text}])


def sampled(text: str, chat: ChatTemplate = TINY, *, stop: bool = True) -> Completion:
    tokens = chat.encode(text)
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


def test_a_call_is_written_as_the_model_wrote_it_where_the_template_allows_it() -> None:
    talk = Conversation.of(prompt(), TINY)
    said = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    talk.add_completion(sampled(f"{said}<|end|>"), Reading("", (ToolCall("add", {"a": 1}),)))
    talk.add_messages([{"role": "tool", "content": "1"}])
    assert TINY.decode(talk.context()) == f"<|user|>2+2<|assistant|>{said}<|end|><|tool|>1<|assistant|>"
    assert talk.num_forks == 0
