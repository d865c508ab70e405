"""A conversation as tokens: what the model sampled stays as it was sampled, and only new messages are tokenised.

Before each turn the chat template renders the whole history. As long as that text begins with what the model has seen,
the rest of it is appended as observation tokens, masked out of the loss. When the template writes earlier turns in
another way (it strips their thoughts, trims or reorders them), the conversation forks: the tokens so far become a
finished trajectory, and the newly rendered history becomes the prompt of the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tqppo.data.dataset import Message
from tqppo.data.prompts import Prompt
from tqppo.protocols import Completion
from tqppo.rollout.template import ChatTemplate, Schema, TemplateRefused, num_common
from tqppo.rollout.tools.calls import Reading
from tqppo.rollout.trajectory import Trajectory

CHARACTERS = 48  # of a fork's texts


@dataclass(slots=True)
class _Sequence:
    """The trajectory that is being written, and the text that the template writes for its tokens."""

    prompt: list[int]
    text: str
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    last: Completion | None = None

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def sample(self, completion: Completion, text: str) -> None:
        self.tokens += completion.tokens
        self.mask += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.text += text
        self.turn_ends.append(len(self.tokens))
        self.last = completion

    def forget(self, num_tokens: int, text: str) -> None:
        """Take back the observation after `num_tokens` tokens."""
        del self.tokens[num_tokens:], self.mask[num_tokens:], self.logprobs[num_tokens:]
        self.text = text

    def trajectory(self) -> Trajectory | None:
        """The trajectory up to its last sampled token; None if it has none."""
        if self.last is None:
            return None
        end = self.turn_ends[-1]
        return Trajectory(
            prompt_tokens=self.prompt,
            response_tokens=self.tokens[:end],
            response_mask=self.mask[:end],
            logprobs=self.logprobs[:end],
            finish=self.last.finish_reason,
            weight_version=self.last.weight_version,
            num_turns=len(self.turn_ends),
            turn_ends=tuple(self.turn_ends),
        )


@dataclass(frozen=True, slots=True)
class _Turn:
    """The assistant's last turn as text: what it said, the token that ended it, and the calls that it contains."""

    body: str
    terminator: str
    reading: Reading | None

    @property
    def structured(self) -> Message | None:
        """The turn with its calls as fields, for templates to write in their own format; None if it has none."""
        calls = [] if self.reading is None else [call.as_message() for call in self.reading.calls if not call.error]
        if self.reading is None or not calls:
            return None
        return {"role": "assistant", "content": self.reading.text, "tool_calls": calls}


class _History(NamedTuple):
    messages: list[Message]
    text: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Where the template wrote an earlier turn in another way: texts from the first difference on, cut short."""

    num_turns: int  # sampled before it
    seen: str
    rendered: str


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """The state before the last messages became tokens, kept until the model answers them."""

    messages: list[Message]
    waiting: list[Message]
    turn: _Turn | None
    num_tokens: int
    text: str


class Conversation:
    """The messages and tokens of one session.

        talk = Conversation.of(prompt, llm.chat)
        talk.add_completion(await llm.generate(talk.context()))
        talk.add_messages([{"role": "user", "content": "Are you sure?"}])
        talk.add_completion(await llm.generate(talk.context()))
        return talk.trajectories()

    Messages wait until `context` is asked for, so that the template sees those that it merges together.
    """

    def __init__(
        self, chat: ChatTemplate, messages: Sequence[Message], *, tools: Sequence[Schema] = (), plain: bool = False
    ) -> None:
        self.chat = chat
        self.messages = list(messages)
        self.tools = tuple(tools)
        self.forks: list[Fork] = []
        self._plain = plain or not chat.exists
        self._finished: list[Trajectory] = []
        self._waiting: list[Message] = []
        self._turn: _Turn | None = None  # the last turn, while it is not among the messages yet
        self._unsettled: _Unsettled | None = None
        text = self._render(self.messages)
        self._current = _Sequence(chat.encode(text), text)

    @classmethod
    def of(cls, prompt: Prompt, chat: ChatTemplate, *, tools: Sequence[Schema] = ()) -> Conversation:
        """Begin with a prompt of the dataset. Without tools its tokens are kept as they are, even if they were cut."""
        messages: list[Message] = prompt.messages or [{"role": "user", "content": prompt.text}]
        plain = not chat.exists or prompt.text == "".join(str(message["content"]) for message in messages)
        made = cls(chat, messages, tools=tools, plain=plain)
        if not tools or plain:
            made._current.prompt = list(prompt.tokens)
        return made

    @property
    def num_forks(self) -> int:
        return len(self.forks)

    def context(self) -> list[int]:
        """The tokens for the next request: everything so far, then the messages that were added since the last turn."""
        if self._turn is not None or self._waiting:
            self._settle()
        return self._current.prompt + self._current.tokens

    def add_completion(self, completion: Completion, reading: Reading | None = None) -> None:
        """Append a turn that the model sampled after `context()`. `reading` has the tool calls that it contains."""
        assert self._turn is None, "two turns in a row: ask for context() between them"
        body, terminator = self._split(completion)
        self._current.sample(completion, body + terminator)
        self._turn, self._unsettled = _Turn(body, terminator, reading), None

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages that the model did not write: the user's, or results of tools."""
        before = self._unsettled
        if before is not None and not self._waiting:  # messages became tokens that no turn answered: do it again
            self.messages, self._waiting, self._turn = before.messages, list(before.waiting), before.turn
            self._current.forget(before.num_tokens, before.text)
        self._waiting += messages

    def restart(self, messages: Sequence[Message]) -> None:
        """End the trajectory; begin one whose prompt is these messages, such as a shorter history."""
        ended, text = self._current.trajectory(), self._render(messages)
        self._finished += [] if ended is None else [ended]
        self._current = _Sequence(self._encode_history(text), text)
        self.messages, self._waiting, self._turn, self._unsettled = list(messages), [], None, None

    def text_of(self, completion: Completion) -> str:
        """What a completion says, without the token that ended it. Special tokens within it are kept."""
        return self._split(completion)[0]

    def trajectories(self) -> list[Trajectory]:
        """The finished trajectories and the current one, without messages that no turn answered."""
        current = self._current.trajectory()
        return [*self._finished, *([] if current is None else [current])]

    # From messages to tokens.

    def _settle(self) -> None:
        """Bring the last turn and the waiting messages into the tokens, or fork."""
        rendered = self._rendered(self._waiting) or self._rendered(_as_user(self._waiting))
        if not rendered:
            self._render([*next(self._histories()), *self._waiting])  # raises the template's reason
        continued = next((each for each in rendered if self._new_text(each.text) is not None), None)
        settled = continued or rendered[-1]  # the last one is in the template's own format
        if continued is not None:
            current = self._current
            self._unsettled = _Unsettled(self.messages, self._waiting, self._turn, len(current.tokens), current.text)
            current.observe(self._encode_after(self._new_text(settled.text) or ""))
            current.text = settled.text
        else:
            self._fork(settled.text)
        self.messages, self._waiting, self._turn = settled.messages, [], None

    def _rendered(self, waiting: Sequence[Message]) -> list[_History]:
        """The messages of each history that the template accepts, followed by these, and their text."""
        found = []
        for history in self._histories():
            with contextlib.suppress(TemplateRefused):
                found.append(_History([*history, *waiting], self._render([*history, *waiting])))
        return found

    def _histories(self) -> Iterator[list[Message]]:
        """The history with the last turn as a message, in the ways that a template may take it; verbatim ones first.

        A template may open the turn itself (`<think>`), and render tool calls in a format of its own.
        """
        turn = self._turn
        if turn is None:
            yield self.messages
            return
        yield [*self.messages, {"role": "assistant", "content": turn.body}]
        opening = "" if self._plain else self.chat.opening(self.messages, tools=self.tools)
        if opening:
            yield [*self.messages, {"role": "assistant", "content": opening + turn.body}]
        if structured := turn.structured:
            yield [*self.messages, structured]

    def _new_text(self, text: str) -> str | None:
        """What the rendered history has after everything that the model has seen; None if it does not begin with that.

        The token that ended the last turn may be one that the template does not write, or writes in another way.
        """
        seen, terminator = self._current.text, self._turn.terminator if self._turn is not None else ""
        if text.startswith(seen):
            return text[len(seen) :]
        body = seen[: len(seen) - len(terminator)]
        return text[len(body) :] if terminator and text.startswith(body) else None

    def _fork(self, text: str) -> None:
        """End the trajectory; begin one whose prompt is the history as the template renders it."""
        ended, seen = self._current.trajectory(), self._current.text
        if ended is not None:
            self._finished.append(ended)
            same = num_common(seen, text)
            shown = slice(max(0, same - CHARACTERS // 2), same + CHARACTERS)
            self.forks.append(Fork(sum(each.num_turns for each in self._finished), seen[shown], text[shown]))
        self._current = _Sequence(self._encode_history(text), text)

    def _encode_history(self, text: str) -> list[int]:
        """Tokens of a history, those of the last trajectory as far as both agree. They part after a special token."""
        old, known = self._current.prompt + self._current.tokens, ""
        kept, begin = 0, 0
        for i, token in enumerate(old):
            if token not in self.chat.special:
                continue
            known += self.chat.decode(old[begin : i + 1])
            begin = i + 1
            if not text.startswith(known):
                break
            kept = i + 1
        shared = self.chat.decode(old[:kept])
        if not kept or not text.startswith(shared):
            return self.chat.encode(text)
        return old[:kept] + self.chat.encode(text[len(shared) :])

    # Texts.

    def _render(self, messages: Sequence[Message]) -> str:
        if self._plain:
            return "".join(str(message["content"]) for message in messages)
        return self.chat.render(messages, tools=self.tools, generate=True)

    def _split(self, completion: Completion) -> tuple[str, str]:
        """A completion's text, and the text of the special token that ended it."""
        tokens = list(completion.tokens)
        ended = completion.finish_reason == "stop" and tokens and tokens[-1] in self.chat.special
        body = tokens[:-1] if ended else tokens
        return self.chat.decode(body), self.chat.decode(tokens[-1:]) if ended else ""

    def _encode_after(self, text: str) -> list[int]:
        """Tokens of a text that follows a special token, as they are within the whole."""
        anchor = self.chat.tokenizer.eos_token
        number = self.chat.tokenizer.eos_token_id
        if not text or anchor is None or number is None:
            return self.chat.encode(text)
        tokens = self.chat.encode(anchor + text)
        return tokens[1:] if tokens[:1] == [number] else self.chat.encode(text)


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template without the role `tool`: results in a row become one message of the user."""
    kept: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            kept.append(message)
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if kept and kept[-1].get("tool_results"):
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n{result}"}
        else:
            kept.append({"role": "user", "content": result, "tool_results": True})
    return kept
