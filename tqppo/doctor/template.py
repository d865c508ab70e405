"""`template check`: plays short conversations with a chat template, and says which turn of which one breaks a prefix.

The conversations are those of `rollout.chat`, so that what is reported is what training does. Further probes look at
what a template adds or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from tqppo.data.dataset import Message
from tqppo.doctor.tokenizers import load_tokenizer
from tqppo.errors import PreflightError
from tqppo.protocols import Completion
from tqppo.rollout.chat import Conversation
from tqppo.rollout.template import MARK, ChatTemplate, TemplateRefused, Tokenizer, num_common
from tqppo.rollout.tools.calls import Reading, ToolCall

FindingKind = Literal["breaks", "refuses", "adds"]
SCHEMA: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
            "required": ["b", "a"],
        },
    },
}
CALL = ToolCall("add", {"b": 2, "a": 1}, id="000000001")
QUESTION: Message = {"role": "user", "content": "What is 1 + 2?"}
AGAIN: Message = {"role": "user", "content": "Are you sure?"}
RESULT: Message = {"role": "tool", "name": "add", "tool_call_id": CALL.id, "content": "3"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ANSWER: Message = {"role": "assistant", "content": "Three."}
THOUGHTS = "<think>\nOne and two.\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class TemplateFinding:
    """One thing that a template does. `turn` counts the assistant's turns from 1; 0 if it is about none of them."""

    template: str
    kind: FindingKind
    about: str
    message: str
    turn: int = 0
    sampled: str = ""
    rendered: str = ""

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the model, and the messages that follow it."""

    text: str
    following: Sequence[Message]
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class Play:
    """A conversation: how it begins, and the turns."""

    name: str
    begin: Sequence[Message]
    turns: Sequence[SampledTurn]


def load_chat(model: str) -> ChatTemplate:
    """The chat template of a folder with a tokenizer, of a hub name, or of the tiny model."""
    chat = ChatTemplate(cast(Tokenizer, load_tokenizer(model)))
    if not chat.exists:
        raise PreflightError(f"the tokenizer of {model!r} has no chat template")
    return chat


def check_templates(chat: ChatTemplate) -> list[TemplateFinding]:
    """What every template of a tokenizer does; some have one for tools besides the usual one."""
    templates = chat.tokenizer.chat_template
    if not isinstance(templates, dict):
        return TemplateCheck(chat, "default").findings()
    named = {name: chat.with_options({"chat_template": name}) for name in templates}
    return [finding for name, each in named.items() for finding in TemplateCheck(each, name).findings()]


@dataclass(frozen=True, slots=True)
class TemplateVoice:
    """What turns look like in a template: its calls, thoughts and ends."""

    chat: ChatTemplate

    def calls(self) -> tuple[str, str]:
        """A call as the template writes it, and the same with other spaces."""
        said = self.own_call() or '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
        if '": ' in said:
            return said, said.replace('": ', '":').replace(', "', ',"')
        return said, said.replace('":', '": ')

    def own_call(self) -> str:
        """The template's text of a structured call; empty if it writes none."""
        message: Message = {"role": "assistant", "content": "", "tool_calls": [CALL.as_message()]}
        try:
            whole = self.chat.render([QUESTION, message], tools=[SCHEMA])
            header, _, ending = self.chat.render([QUESTION, _said(MARK)], tools=[SCHEMA]).partition(MARK)
        except TemplateRefused:
            return ""
        text = whole[len(header) : len(whole) - len(ending)] if whole.startswith(header) else ""
        return text if CALL.name in text else ""

    def thoughts(self) -> str:
        """A thought as the model samples it after the template's opening."""
        opening = self.chat.opening([QUESTION])
        if "</think>" in opening:
            return ""
        return THOUGHTS.removeprefix("<think>\n") if "<think>" in opening else THOUGHTS

    def terminator(self) -> str:
        """The special token that ends a turn: the template's, else the tokenizer's."""
        return self.end_token(self.after(AGAIN)) or self.end_token(self.after()) or self.chat.tokenizer.eos_token or ""

    def after(self, *following: Message) -> str:
        """What the template writes after an answer, with these messages after it."""
        return self.chat.render([QUESTION, _said(MARK), *following]).partition(MARK)[2]

    def end_token(self, text: str) -> str:
        """The special token that a text begins with; empty if it begins with none, or with that of a new message."""
        opening = self.special(self.chat.render([QUESTION]))
        token = self.special(text)
        return "" if token == opening else token

    def special(self, text: str) -> str:
        return next((token for token in self.chat.special.values() if text.startswith(token)), "")

    def refusal(self, messages: Sequence[Message]) -> str | None:
        try:
            self.chat.render(messages, generate=True)
        except TemplateRefused as error:
            return str(error)
        return None


class TemplateCheck:
    """All probes of one template."""

    def __init__(self, chat: ChatTemplate, name: str) -> None:
        self.chat, self.name, self.voice = chat, name, TemplateVoice(chat)

    def findings(self) -> list[TemplateFinding]:
        if (refusal := self.voice.refusal([QUESTION])) is not None:
            return [self._finding("refuses", "a question", refusal)]
        probes = (self._plays, self._roles, self._merging, self._ends, self._opening, self._head, self._tools)
        return [finding for probe in probes for finding in probe()]

    # Conversations.

    def _plays(self) -> Iterator[TemplateFinding]:
        for play in self._script():
            yield from self._played(play)

    def _script(self) -> Iterator[Play]:
        said, other, reading = *self.voice.calls(), Reading("", (CALL,))
        yield Play("two questions", [QUESTION], [SampledTurn("Three.", [AGAIN])])
        yield Play("blanks around an answer", [QUESTION], [SampledTurn("  Three. \n", [AGAIN])])
        yield Play("a tool call", [QUESTION], [SampledTurn(said, [RESULT], reading)])
        yield Play("a tool call in other spaces", [QUESTION], [SampledTurn(other, [RESULT], reading)])
        yield Play("two results", [QUESTION], [SampledTurn(said, [RESULT, RESULT], reading)])
        looks = f"To add, write {said} or so."
        yield Play("text that looks like a tool call", [QUESTION], [SampledTurn(looks, [AGAIN])])
        thoughts = self.voice.thoughts()
        yield Play("thoughts, then a question", [QUESTION], [SampledTurn(f"{thoughts}Three.", [AGAIN])])
        call = SampledTurn(thoughts + said, [RESULT], Reading(thoughts, (CALL,)))
        yield Play("thoughts, then a result", [QUESTION], [call])
        yield Play("a tool call, an answer, a question", [QUESTION], [call, SampledTurn("Three.", [AGAIN])])
        if self.voice.refusal([SYSTEM, QUESTION]) is None:
            yield Play("a system prompt", [SYSTEM, QUESTION], [SampledTurn("Three.", [AGAIN])])

    def _played(self, play: Play) -> Iterator[TemplateFinding]:
        """Play it; every fork is a finding of the turn before it."""
        try:
            talk = Conversation(self.chat, play.begin, tools=[SCHEMA] if play.turns[0].reading else [])
            for turn in play.turns:
                tokens = self.chat.encode(turn.text + self.voice.terminator())
                talk.add_completion(Completion(tokens, [0.0] * len(tokens), "stop", 0), turn.reading)
                talk.add_messages(turn.following)
                talk.context()
        except TemplateRefused as error:
            yield self._finding("refuses", play.name, str(error))
            return
        for fork in talk.forks:
            yield TemplateFinding(
                self.name,
                "breaks",
                play.name,
                f"after turn {fork.num_turns} the template writes the history in another way, so the session forks",
                fork.num_turns,
                fork.seen,
                fork.rendered,
            )

    # What a template adds or refuses.

    def _roles(self) -> Iterator[TemplateFinding]:
        calls: Message = {"role": "assistant", "content": "", "tool_calls": [CALL.as_message()]}
        for about, messages in (
            ("the role system", [SYSTEM, QUESTION]),
            ("the role tool after the text of a call", [QUESTION, _said(self.voice.calls()[0]), RESULT]),
            ("the role tool", [QUESTION, calls, RESULT]),
            ("two questions in a row", [QUESTION, AGAIN]),
        ):
            refusal = self.voice.refusal(messages)
            if refusal is not None:
                yield self._finding("refuses", about, refusal)

    def _merging(self) -> Iterator[TemplateFinding]:
        for about, before, message in (
            ("results in a row", [QUESTION, _said(self.voice.calls()[0])], RESULT),
            ("questions in a row", [], QUESTION),
        ):
            try:
                one = self.chat.render([*before, message])
                two = self.chat.render([*before, message, message])
            except TemplateRefused:
                continue
            if not two.startswith(one):
                message_ = "messages of one role are merged; they have to be added together, as conversations do"
                yield self._difference("adds", about, message_, one, two)

    def _ends(self) -> Iterator[TemplateFinding]:
        """How a turn of the assistant ends: with which token, and with what after it."""
        last, following = self.voice.after(), self.voice.after(AGAIN)
        token, eos = self.voice.end_token(following) or self.voice.end_token(last), self.chat.tokenizer.eos_token
        if not token:
            yield self._finding("adds", "the end of a turn", f"no special token ends a turn; after it comes {last!r}")
        elif token != eos:
            why = f"a turn ends with {token}, and the tokenizer's end of sequence is {eos}: set rollout.stop_token_ids"
            yield self._finding("adds", "the end of a turn", why)
        elif last.startswith(token) and last != token:
            why = f"{last[len(token) :]!r} follows the end of a turn; the model does not sample it, so it is masked out"
            yield self._finding("adds", "the end of a turn", why)
        if self.voice.end_token(last) != self.voice.end_token(following) or not following.startswith(last):
            about, why = "the end of the last turn", "the last turn ends in another way than one that others follow"
            yield self._difference("adds", about, why, last, following)

    def _opening(self) -> Iterator[TemplateFinding]:
        if opening := self.chat.opening([QUESTION]):
            why = f"the template begins the assistant's turn with {opening!r}, before the model speaks"
            yield self._finding("adds", "the generation prompt", why)

    def _head(self) -> Iterator[TemplateFinding]:
        """A system prompt of the template's own, and the date."""
        first = self.chat.render([_asked(MARK)]).partition(MARK)[0]
        later = self.chat.render([QUESTION, ANSWER, _asked(MARK)]).partition(MARK)[0]
        added = first[: len(first) - num_common(first[::-1], later[::-1])]
        for token in self.chat.special.values():
            added = added.replace(token, " ")
        if len(added.split()) > 1:
            yield self._finding("adds", "a system prompt", f"the template adds one of its own: {added.strip()!r}")
        dates = [datetime(2001, 2, 3, 4, 5, 6), datetime(2012, 11, 10, 9, 8, 7)]
        texts = [self.chat.with_options({"strftime_now": date.strftime}).render([QUESTION]) for date in dates]
        if texts[0] != texts[1]:
            why = "the template writes the date or the time; a conversation keeps those of its beginning"
            yield self._difference("adds", "the date", why, *texts)

    def _tools(self) -> Iterator[TemplateFinding]:
        try:
            shown = self.chat.render([QUESTION], tools=[SCHEMA])
        except TemplateRefused as error:
            yield self._finding("refuses", "tools", str(error))
            return
        if "Adds two numbers." not in shown:
            yield self._finding("adds", "tools", "tools are not shown to the model; name them in data.system_prompt")
        own, other = self.voice.own_call(), self.voice.calls()[1]
        if not own:
            yield self._finding("adds", "tool calls", "structured calls are not written; sampled text is kept as it is")
        elif own != other:
            why = f"structured calls are written as {own!r}, whatever was sampled; sampled text is kept where it can be"
            yield self._finding("adds", "tool calls", why)

    # Parts.

    def _finding(self, kind: FindingKind, about: str, message: str) -> TemplateFinding:
        return TemplateFinding(self.name, kind, about, message)

    def _difference(self, kind: FindingKind, about: str, message: str, one: str, two: str) -> TemplateFinding:
        same = max(0, num_common(one, two) - 20)
        return TemplateFinding(self.name, kind, about, message, 0, one[same : same + 60], two[same : same + 60])


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}


def render(findings: Sequence[TemplateFinding], echo: Callable[[str], None]) -> None:
    """Print the findings, those that break a prefix first."""
    marks = {"breaks": "breaks ", "refuses": "refuses", "adds": "adds   "}
    for kind, mark in marks.items():
        for each in findings:
            if each.kind != kind:
                continue
            place = f"turn {each.turn} of {each.about!r}" if each.turn else each.about
            echo(f"{mark} {place}: {each.message}")
            if each.sampled or each.rendered:
                echo(f"          {each.sampled!r}\n        → {each.rendered!r}")
