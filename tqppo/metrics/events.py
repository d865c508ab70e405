"""What the driver reports besides metrics, as typed events: each is a line of events.jsonl, a notice is also shown.

The stages of a step call a `ReportEvent`; a run passes one that writes the file and the screen. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

LeftOutAs = Literal["failed", "dropped"]


@dataclass(frozen=True, slots=True)
class GroupLeftOut:
    """A prompt that was sampled and is not trained on, and why."""

    name: ClassVar[str] = "group_left_out"

    step: int
    prompt: str
    outcome: LeftOutAs
    reason: str
    rows: int  # rows that were removed from the queue

    @property
    def notice(self) -> str:
        """Returns no notice: a metric counts these, and printing each would flood the screen."""
        return ""


@dataclass(frozen=True, slots=True)
class SessionsLeftOut:
    """Sessions of a prompt that failed, where the group goes on without them, and why the first of them failed."""

    name: ClassVar[str] = "sessions_left_out"

    step: int
    prompt: str
    sessions: int
    reason: str

    @property
    def notice(self) -> str:
        """Returns no notice: the metric `sessions/failed` counts these."""
        return ""


@dataclass(frozen=True, slots=True)
class ShortBatch:
    """A step that ran out of rounds: fewer groups than the config asks for, or groups without signal among them."""

    name: ClassVar[str] = "short_batch"

    step: int
    wanted: int
    useful: int  # groups that are complete and, with filter_groups, have signal
    filled: int  # groups without signal that were taken in their place
    rounds: int

    @property
    def notice(self) -> str:
        filled = f", and {self.filled} without signal" if self.filled else ""
        return (
            f"step {self.step} trains on {self.useful} of {self.wanted} groups{filled}: {self.rounds} rounds gave no "
            'more (algorithm.filter_max_rounds; rollout.on_short_batch = "error" would stop)'
        )


@dataclass(frozen=True, slots=True)
class NothingToTrain:
    """Mini-batches in which no token counts; their optimizer steps were skipped."""

    name: ClassVar[str] = "nothing_to_train"

    step: int
    role: str
    mini_batches: int

    @property
    def notice(self) -> str:
        return (
            f"step {self.step}: {self.mini_batches} mini-batches of the {self.role} had no token that counts, and were "
            "not trained on"
        )


@dataclass(frozen=True, slots=True)
class IdleGpus:
    """GPUs that the run does not use: `idle` of those that it reserves, and `unused` others of the cluster."""

    name: ClassVar[str] = "idle_gpus"

    step: int
    idle: int
    unused: int

    @property
    def notice(self) -> str:
        idle = f"{self.idle} of the reserved GPUs have nothing to do (tqppo validate-config shows which)"
        unused = f"{self.unused} GPUs of the cluster are not used (cluster.nodes × cluster.gpus_per_node)"
        return "; ".join([*([idle] if self.idle else []), *([unused] if self.unused else [])])


@dataclass(frozen=True, slots=True)
class TrajectoriesNotWritten:
    """A step whose trajectories found the disk full, in a run that goes on all the same."""

    name: ClassVar[str] = "trajectories_not_written"

    step: int
    problem: str

    @property
    def notice(self) -> str:
        return f"the trajectories of step {self.step} were not written, training goes on: {self.problem}"


@dataclass(frozen=True, slots=True)
class ProcessReplaced:
    """A process of an engine, a teacher or a reward function that died or did not answer, in a run that goes on."""

    name: ClassVar[str] = "process_replaced"

    step: int
    process: str
    reason: str

    @property
    def notice(self) -> str:
        reason = self.reason.strip().partition("\n")[0]
        return f"step {self.step}: {self.process} was replaced: {reason}"


Event = (
    GroupLeftOut | SessionsLeftOut | ShortBatch | NothingToTrain | IdleGpus | TrajectoriesNotWritten | ProcessReplaced
)
ReportEvent = Callable[[Event], None]


def unreported(event: Event) -> None:
    """The `ReportEvent` of a part that runs outside a run, such as a test's."""
