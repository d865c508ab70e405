"""One session, played in this process and printed turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.doctor.agent import PlayedSession, Segment, SessionFailed, Wanted, play, render
from tqppo.errors import DataError

LOOPS = """
from tqppo import AgentLoop, Conversation

class Twice(AgentLoop):
    async def run(self, prompt, llm):
        talk = Conversation.of(prompt, llm.chat)
        talk.add_completion(await llm.generate(talk.context(), max_new_tokens=3))
        talk.add_messages([{"role": "user", "content": "sure?"}])
        talk.add_completion(await llm.generate(talk.context(), max_new_tokens=2))
        return talk.trajectories()

class Broken(AgentLoop):
    async def run(self, prompt, llm):
        return [][0]

class Empty(AgentLoop):
    async def run(self, prompt, llm):
        return []
"""


@pytest.fixture
def loops(tmp_path: Path) -> str:
    (tmp_path / "loops.py").write_text(LOOPS)
    return f"{tmp_path}/loops.py"


def config(agent: str, *settings: str) -> Config:
    chosen = [f"rollout.agent={agent}", "warm_start.steps=0", "rollout.max_context_tokens=64", *settings]
    made = compile_config("quickstart", [], chosen, {}).config
    assert made is not None
    return made


def lines(played: PlayedSession) -> list[str]:
    printed: list[str] = []
    render(played, printed.append)
    return printed


def test_session_is_shown_in_turns_and_observations_with_log_probabilities(loops: str) -> None:
    played = play(config(f"{loops}:Twice"), Wanted("3142", answer="1234"))
    (trajectory,) = played.trajectories
    assert trajectory.prompt == "<|user|>3142<|assistant|>"
    assert [segment.is_sampled for segment in trajectory.segments] == [True, False, True]
    assert "".join(trajectory.segments[1].tokens).endswith("<|user|>sure?<|assistant|>")
    assert all(value < 0 for value in trajectory.segments[0].logprobs)
    assert not any(trajectory.segments[1].logprobs)
    assert played.reward == 0.0
    text = "\n".join(lines(played))
    assert "turn 1 (3 tokens, trained on, log-probability -" in text
    assert "no loss)\n    " in text
    assert "turn 2 (2 tokens" in text
    assert ", reward 0, agent/reused_tokens" in text.splitlines()[-1]


def test_same_session_has_the_same_samples_and_another_has_others(loops: str) -> None:
    first, same, other = (play(config(f"{loops}:Twice"), Wanted("3142", session=i)) for i in (0, 0, 1))
    assert first == same
    assert first.trajectories != other.trajectories
    assert first.reward is None
    assert "unknown: give --answer" in lines(first)[-1]


def test_prompt_of_the_dataset_is_played_where_none_is_given() -> None:
    played = play(config("single_turn"), Wanted(index=2, is_greedy=True))
    assert played.reward is not None
    with pytest.raises(DataError, match="there is no prompt 10000: the dataset has 10000"):
        play(config("single_turn"), Wanted(index=10_000))


@pytest.mark.parametrize(
    ("loop", "message"),
    [("Broken", r"IndexError: list index out of range \(.*loops\.py:14\)"), ("Empty", "returned no trajectories")],
)
def test_loop_that_fails_is_a_message_with_its_place(loops: str, loop: str, message: str) -> None:
    with pytest.raises(SessionFailed, match=message):
        play(config(f"{loops}:{loop}"), Wanted("3142"))


def test_token_with_a_line_end_stays_readable() -> None:
    from tqppo.doctor.agent import PlayedTrajectory

    segment = Segment(True, ["a", "\n"], [-1.0, -2.0])
    played = PlayedSession([PlayedTrajectory("p", 1, [segment], "stop", {"tool_use": 1.0})], "a", 1.0, {"calls": 2.0})
    assert "    'a' -1.00  '\\n' -2.00" in lines(played)
    assert lines(played)[-2:] == ["  ended by stop, tool_use 1", "answer 'a', reward 1, calls 2"]
