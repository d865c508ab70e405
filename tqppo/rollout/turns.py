"""The turns of trajectories as columns: where each ends, what it earned, and the state that it began in.

The writer adds them to the rows of runs that credit turns; the worker checks what an agent loop gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from tqppo.queue.meta import Jagged
from tqppo.rollout.trajectory import Trajectory


def check_turns(trajectory: Trajectory) -> None:
    """Raise ValueError unless ends, rewards and anchors of the turns fit each other and the response."""
    if not (trajectory.turn_ends or trajectory.turn_rewards or trajectory.anchors):
        return
    ends = turn_ends(trajectory)
    ascends = all(a < b for a, b in zip((0, *ends), ends, strict=False)) or ends == (0,)
    if not ascends or ends[-1] > len(trajectory.response_tokens):
        raise ValueError(
            f"turn_ends {list(ends)} must ascend within a response of {len(trajectory.response_tokens)} tokens"
        )
    for name, values in (("turn_rewards", trajectory.turn_rewards), ("anchors", trajectory.anchors)):
        if values and len(values) != len(ends):
            raise ValueError(f"{name} has {len(values)} entries for {len(ends)} turns")


def turn_ends(trajectory: Trajectory) -> tuple[int, ...]:
    """The loop's own, or the whole response as one turn."""
    return tuple(trajectory.turn_ends) or (len(trajectory.response_tokens),)


def turn_columns(rows: Sequence[tuple[Trajectory, float]]) -> dict[str, Jagged | torch.Tensor]:
    """Columns for these trajectories, each with the reward that its last turn earns if the loop rewards no turns."""
    ends = [turn_ends(each) for each, _ in rows]
    rewards = [
        each.turn_rewards or [0.0] * (len(turns) - 1) + [reward]
        for (each, reward), turns in zip(rows, ends, strict=True)
    ]
    anchors = [
        [_number(name.encode()) for name in each.anchors] or _contexts(each, turns)
        for (each, _), turns in zip(rows, ends, strict=True)
    ]
    counts = torch.tensor([len(turns) for turns in ends])
    return {
        "turn_ends": Jagged(torch.tensor([end for turns in ends for end in turns]), counts),
        "turn_rewards": Jagged(torch.tensor([value for each in rewards for value in each]).float(), counts),
        "turn_anchors": Jagged(torch.tensor([value for each in anchors for value in each]), counts),
    }


def _contexts(trajectory: Trajectory, ends: Sequence[int]) -> list[int]:
    """The state before each turn where the loop names none: all tokens up to the turn's first sampled one."""
    tokens = np.array([*trajectory.prompt_tokens, *trajectory.response_tokens], np.int64)
    first, numbers = len(trajectory.prompt_tokens), []
    for begin, end in zip((0, *ends), ends, strict=False):
        sampled = next((i for i in range(begin, end) if trajectory.response_mask[i]), end)
        numbers.append(_number(tokens[: first + sampled].tobytes()))
    return numbers


def _number(state: bytes) -> int:
    return int.from_bytes(blake2b(state, digest_size=8).digest(), "little", signed=True)
