"""Sessions in environments with `reset` and `step`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scripted import CHAT, ScriptedEngine, play, prompt_of, session_on, text_of

from tqppo.errors import ConfigError
from tqppo.rollout.loops.base import check_loop
from tqppo.rollout.loops.environment import EnvironmentLoop
from tqppo.rollout.trajectory import Trajectory

END = "<|end|>"
GAMES = """
import time
from tqppo import Environment, Step

CLOSED = []

class Number(Environment):
    def __init__(self, hello="Guess."):
        self.hello = hello

    def reset(self, prompt):
        self.number = int(prompt.answer)
        return self.hello

    def step(self, action):
        if action == str(self.number):
            return Step("Right.", reward=1.0, done=True, metrics={"won": 1.0})
        return Step("More." if int(action) < self.number else "Less<|user|>.", reward=-0.25)

    def close(self):
        CLOSED.append(self.number)

class AsGymnasium:
    def reset(self, prompt):
        return ""

    async def step(self, action):
        return "again", 0.5, False, action == "stop", {}

    def close(self):
        pass

class Slow(Environment):
    def step(self, action):
        time.sleep(3.0)
"""


@pytest.fixture
def games(tmp_path: Path) -> str:
    (tmp_path / "games.py").write_text(GAMES)
    return f"{tmp_path}/games.py"


def played(loop: EnvironmentLoop, *lines: str, answer: str = "7") -> tuple[list[Trajectory], ScriptedEngine]:
    engine = ScriptedEngine([line + END for line in lines])
    return play(loop, prompt_of("a game", answer), session_on(engine)), engine


def test_episode_ends_when_it_is_done_and_its_rewards_are_those_of_its_turns(games: str) -> None:
    (trajectory,), engine = played(EnvironmentLoop(f"{games}:Number"), "3", "9", "7")
    assert engine.contexts[0] == "<|user|>Guess.<|assistant|>"
    assert text_of(trajectory) == f"3{END}9{END}7{END}"
    assert text_of(trajectory, sampled=False) == "<|user|>More.<|assistant|><|user|>Less< |user|>.<|assistant|>"
    assert trajectory.turn_rewards == (-0.25, -0.25, 1.0)
    assert trajectory.reward == 0.5
    assert trajectory.metrics == {"won": 1.0, "is_done": 1.0}


def test_turns_that_begin_in_one_state_share_an_anchor(games: str) -> None:
    (trajectory,), _ = played(EnvironmentLoop(f"{games}:Number", max_turns=3), "3", "4", "5")
    first, second, third = trajectory.anchors
    assert second == third != first
    assert trajectory.metrics["is_done"] == 0.0


def test_class_without_our_base_and_with_coroutines_is_an_environment(games: str) -> None:
    (trajectory,), engine = played(EnvironmentLoop(f"{games}:AsGymnasium"), "go", "stop")
    assert engine.contexts[0] == "<|user|>a game<|assistant|>"  # an empty observation: the prompt as it is
    assert CHAT.decode(trajectory.prompt_tokens) == engine.contexts[0]
    assert trajectory.reward == 1.0


def test_environment_is_closed_whatever_happens(games: str) -> None:
    loop = EnvironmentLoop(f"{games}:Number")
    with pytest.raises(ValueError, match="invalid literal"):
        played(loop, "no number", answer="5")
    assert sys.modules["games"].CLOSED == [5]


def test_late_step_fails_its_session_with_the_name_of_the_environment(games: str) -> None:
    with pytest.raises(TimeoutError, match=r"games\.py:Slow: step took longer than 1 s"):
        played(EnvironmentLoop(f"{games}:Slow", timeout_s=1.0), "go")


def test_arguments_reach_the_constructor(games: str) -> None:
    _, engine = played(EnvironmentLoop(f"{games}:Number", args={"hello": "Which?"}, role="system"), "7")
    assert engine.contexts[0] == "<|system|>Which?<|assistant|>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"environment": "nowhere"}, "is not skyrl:NAME"),
        ({"environment": "tqppo.data.lookup:f"}, "not a class with a method"),
        ({"environment": "tqppo.nowhere:Game"}, "cannot be imported"),
        ({"environment": "tqppo.rollout.environments:Environment", "max_turns": 0}, "max_turns"),
        ({}, "do not fit"),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loop("environment", arguments)
