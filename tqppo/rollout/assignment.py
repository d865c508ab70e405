"""What a rollout worker is asked to sample. `run` makes one for training and one for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqppo.protocols import Sampling


@dataclass(frozen=True, slots=True)
class Assignment:
    """How to sample the prompts of one step or of one validation."""

    seed: int
    step: int
    group_size: int
    sampling: Sampling
    partition: str = "train"
    greedy: bool = False  # one more session per prompt, at temperature 0: ReMax's baseline, validation's greedy answer
    turns: bool = False  # whether rows get columns that describe their turns
    keep_tensors: bool = True  # False in validation, which reads tags only

    @property
    def num_sessions(self) -> int:
        """Sessions per prompt; the greedy one comes last and has the number `group_size`."""
        return self.group_size + self.greedy

    @property
    def batch(self) -> str:
        """The batch id that a deterministic engine uses for the sessions of this step."""
        return f"{self.seed}-{self.partition}-{self.step}"

    def session_parts(self, uid: str, session: int) -> tuple[int | str, ...]:
        """What the seeds of a session's turns follow from."""
        return (self.seed, self.partition, self.step, uid, session)


def session_name(parts: Sequence[int | str]) -> str:
    """The name of a session, and of a sub-agent's, whose own names come after a slash each."""
    return "/".join(("-".join(map(str, parts[:5])), *map(str, parts[5:])))
