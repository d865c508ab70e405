"""The agent loop with tools: the model calls Python functions, sees their results, and goes on until it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tqppo.builtin import AnswerScope, OnToolError, check_agent_arguments
from tqppo.data.prompts import Prompt
from tqppo.errors import ConfigError, DataError, PreflightError
from tqppo.processes.pool import ProcessPool
from tqppo.rollout.chat import Conversation
from tqppo.rollout.loops.base import AgentLoop
from tqppo.rollout.session import Session
from tqppo.rollout.template import ChatTemplate, TemplateRefused
from tqppo.rollout.tools.calls import Reading
from tqppo.rollout.tools.parsers import Parser, parser_named
from tqppo.rollout.tools.pool import ToolPool, ToolResult, ToolSpec
from tqppo.rollout.trajectory import Trajectory


class ToolFailed(Exception):
    """A tool failed, and `on_tool_error` says that this fails the session."""


@dataclass(eq=False)
class ToolLoop(AgentLoop):
    """Plays a session of several turns. `rollout.agent_args` are its fields."""

    tools: Sequence[str]  # functions as `module:function` or `file.py:function`
    parser: str = "auto"  # of tool calls: hermes, llama3_json, mistral, xml, tiny; auto: by the chat template
    max_turns: int = 4  # the calls of the last turn are not made
    max_calls: int = 8  # per turn; further ones are errors
    timeout_s: float = 10.0  # of one call
    workers: int = 4  # calls at a time, per engine replica
    max_output_chars: int = 256  # of a result; the middle of a longer one is left out
    memory_gb: float = 8.0  # address space of one call; 0: no limit
    on_tool_error: OnToolError = "show"  # to the model, or end the session there, or fail it
    answer: AnswerScope = "last_turn"  # what the reward function scores
    template_args: Mapping[str, object] = field(default_factory=dict)  # of the chat template, such as enable_thinking

    def __post_init__(self) -> None:
        self.spec = ToolSpec(self.tools, self.workers, self.timeout_s, self.max_output_chars, self.memory_gb)
        self.pool: ToolPool | None = None

    @classmethod
    def check(cls, args: Mapping[str, object]) -> None:
        """Check values and ranges, import the tools in a process of their own, and read their signatures."""
        check_agent_arguments("tools", args)
        loop = cls(**args)  # type: ignore[arg-type]
        try:
            ProcessPool(loop.spec.process(), 1).close()
        except DataError as error:
            raise ConfigError(f"rollout.agent_args.tools: {error}") from None

    async def start(self, chat: ChatTemplate) -> None:
        if not chat.exists:
            raise PreflightError("the agent loop tools needs a chat template, and the tokenizer has none")
        self.read: Parser = parser_named(self.parser, str(chat.tokenizer.chat_template))
        self.chat = chat.with_options(self.template_args)
        self.pool = ToolPool(self.spec)
        try:
            self.chat.render([{"role": "user", "content": "?"}], tools=self._schemas, generate=True)
        except TemplateRefused as error:
            raise PreflightError(f"rollout.agent = tools: {error}") from None

    async def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    @property
    def _schemas(self) -> list[Mapping[str, object]]:
        assert self.pool is not None, "start() comes first"
        return [tool.schema for tool in self.pool.tools.values()]

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        talk = Conversation.of(prompt, self.chat, tools=self._schemas)
        self._count_nothing(llm)
        reading, is_full, num_good = Reading(""), False, 0
        for turn in range(self.max_turns):
            if turn:
                await self.before_turn(talk, llm)
            context = talk.context()
            is_full = turn > 0 and not llm.room(len(context))
            if is_full:
                break
            completion = await llm.generate(context)
            reading = self._read(talk.text_of(completion), turn)
            talk.add_completion(completion, reading)
            if not reading.calls or completion.finish_reason != "stop" or turn == self.max_turns - 1:
                break
            results = await self._call(reading, llm)
            num_good += sum(not result.is_error for result in results)
            if self._ends(results):
                break
            talk.add_messages(self._messages(reading, results))
        llm.count("agent/forks", talk.num_forks)
        return self._finished(talk, reading, is_full=is_full, used_tools=num_good > 0)

    async def before_turn(self, talk: Conversation, llm: Session) -> None:
        """Called between turns, when the results of the last one are in the conversation. A subclass may rewrite it."""

    def _read(self, text: str, turn: int) -> Reading:
        """The calls of a turn, each with an id; those beyond the limit are errors."""
        reading = self.read(text)
        calls = [replace(call, id=f"{turn:04d}{i:05d}") for i, call in enumerate(reading.calls[: self.max_calls])]
        if len(reading.calls) > self.max_calls:
            calls[-1] = replace(calls[-1], error=f"at most {self.max_calls} calls are made per turn")
        return replace(reading, calls=tuple(calls))

    async def _call(self, reading: Reading, llm: Session) -> list[ToolResult]:
        """The results of a turn's calls, in their order; the calls run at the same time."""
        assert self.pool is not None, "start() comes first"
        results = await asyncio.gather(*(self.pool.call(call) for call in reading.calls))
        for call, result in zip(reading.calls, results, strict=True):
            name = call.name if call.name in self.pool.tools else "unknown"
            llm.count(f"tool/{name}/calls")
            llm.count(f"tool/{name}/errors", result.is_error)
            llm.count(f"tool/{name}/seconds", result.seconds)
            if result.is_error:
                llm.log.debug("the tool %s failed: %s", name, result.text)
        return results

    def _count_nothing(self, llm: Session) -> None:
        """Make the tools' metrics 0 in a step without calls."""
        assert self.pool is not None, "start() comes first"
        for name in self.pool.tools:
            for what in ("calls", "errors", "seconds"):
                llm.count(f"tool/{name}/{what}", 0.0)

    def _ends(self, results: Sequence[ToolResult]) -> bool:
        """Whether the session ends here by policy."""
        failed = [result.text for result in results if result.is_error]
        if failed and self.on_tool_error == "fail":
            raise ToolFailed(f'{failed[0]} (rollout.agent_args.on_tool_error is "fail")')
        return bool(failed) and self.on_tool_error == "end"

    def _messages(self, reading: Reading, results: Sequence[ToolResult]) -> list[dict[str, object]]:
        """The results as messages. Special tokens in them are made harmless: a tool must not speak for the user."""
        return [
            {
                "role": "tool",
                "name": call.name,
                "tool_call_id": call.id,
                "content": self.chat.defused(f"error: {result.text}" if result.is_error else result.text),
            }
            for call, result in zip(reading.calls, results, strict=True)
        ]

    def _finished(self, talk: Conversation, reading: Reading, *, is_full: bool, used_tools: bool) -> list[Trajectory]:
        *before, last = talk.trajectories()
        said = last.response_tokens[last.turn_ends[-2] if len(last.turn_ends) > 1 else 0 :]
        mask = last.response_mask[len(last.response_mask) - len(said) :]
        spoken = [token for token, is_sampled in zip(said, mask, strict=True) if is_sampled]
        last = replace(
            last,
            finish="length" if is_full else last.finish,
            answer=self.chat.decode(spoken, special=False) if self.answer == "last_turn" else None,
            metrics={"tool_use": float(used_tools), "called_at_end": float(bool(reading.calls))},
        )
        return [*before, last]
