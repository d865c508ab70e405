"""Which groups form a training batch: draw prompts, have them sampled, sort the groups that come back.

Every prompt that is dispatched ends up trained on, dropped or failed. `Ledger` counts them, and a step whose numbers
do not add up is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tqppo.data.prompts import Prompt
from tqppo.errors import QueueError, TrainingAborted
from tqppo.metrics.events import GroupLeftOut, LeftOutAs, ReportEvent, SessionsLeftOut, ShortBatch, unreported
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta

Incomplete = Literal["error", "drop", "keep", "refill"]
Short = Literal["error", "train"]
Generate = Callable[[Sequence[tuple[int, Prompt]]], None]


@dataclass(frozen=True, slots=True)
class CollectorOptions:
    """What becomes of groups that are incomplete or have no signal, and of a batch that stays short of groups."""

    on_incomplete: Incomplete = "error"
    filter_groups: bool = False
    max_rounds: int = 4
    on_short: Short = "train"


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The rows of one prompt, and the outcome that its marker gives."""

    uid: str
    status: str
    error: str
    failed_sessions: int
    rows: BatchMeta

    def has_no_signal(self) -> bool:
        """Whether all sessions earned the same reward, so that a group estimator gives each of them 0."""
        last = {tags["session"]: tags["reward"] for tags in self.rows.in_order().tags}
        return len(set(last.values())) <= 1

    @property
    def why_left_out(self) -> str:
        """The reason that events.jsonl gives for a group that is not complete."""
        if self.status == "dropped":
            return "the reward function failed, and reward.on_error drops the group"
        return self.error or "a session returned no trajectory"


@dataclass(slots=True)
class Ledger:
    """What became of the prompts of one step, in prompts, sessions and rows."""

    dispatched: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    failed_sessions: int = 0
    retried_sessions: int = 0
    filtered_rows: int = 0
    failed_rows: int = 0

    def check(self) -> None:
        """Raise unless every prompt is accounted for."""
        if self.dispatched != self.trained + self.dropped + self.failed:
            raise QueueError(
                f"{self.dispatched} prompts were dispatched, but {self.trained} are trained on, {self.dropped} were "
                f"dropped and {self.failed} failed; the numbers must add up, so rows were lost or counted twice"
            )

    def metrics(self) -> Metrics:
        return {
            "groups/dispatched": float(self.dispatched),
            "groups/trained": float(self.trained),
            "groups/dropped": float(self.dropped),
            "groups/failed": float(self.failed),
            "sessions/failed": float(self.failed_sessions),
            "sessions/retried": float(self.retried_sessions),
            "training/filter_groups/evicted_samples": float(self.filtered_rows),
            "training/rollout_failure/evicted_samples": float(self.failed_rows),
        }


@dataclass(slots=True)
class CollectedStep:
    """The groups of one step so far."""

    number: int
    num_prompts: int
    kept: list[PromptGroup] = field(default_factory=list)
    without_signal: list[PromptGroup] = field(default_factory=list)  # spare: used if the rounds run out
    num_to_replace: int = 0  # groups of the last round that a new prompt should replace
    num_rounds: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def num_missing(self) -> int:
        return max(0, self.num_prompts - len(self.kept))


@dataclass(frozen=True)
class GroupCollector:
    """Collects whole groups from the queue, and replaces those that the config leaves out."""

    queue: Queue
    draw: Callable[[int], list[Prompt]]
    options: CollectorOptions
    report: ReportEvent = unreported

    def collect(self, num_prompts: int, generate: Generate, step: int = 0) -> tuple[BatchMeta, Metrics]:
        """A batch of `num_prompts` groups in canonical order; its rows and no others are left in the queue."""
        found = CollectedStep(step, num_prompts)
        while found.num_rounds == 0 or (self._wants_more(found) and found.num_rounds < self.options.max_rounds):
            self._round(found, generate)
        groups = self._chosen(found)
        if not groups:
            raise TrainingAborted(
                "no trajectories: every group of this step failed or was dropped; events.jsonl has the reasons"
            )
        found.ledger.trained = len(groups)
        found.ledger.check()
        return BatchMeta.join([group.rows for group in groups]).in_order(), found.ledger.metrics()

    def _wants_more(self, found: CollectedStep) -> bool:
        return bool(found.num_missing and (found.num_to_replace or self.options.filter_groups))

    def _round(self, found: CollectedStep, generate: Generate) -> None:
        """Sample as many new prompts as groups are missing."""
        prompts = self.draw(found.num_missing)
        generate(list(enumerate(prompts, start=found.ledger.dispatched)))
        found.ledger.dispatched += len(prompts)
        found.num_rounds += 1
        found.num_to_replace = 0
        for group in self._settled(prompts, found.ledger):
            self._sort(group, found)

    def _settled(self, prompts: Sequence[Prompt], ledger: Ledger) -> list[PromptGroup]:
        """The groups of these prompts, in order. Their markers are removed from the queue."""
        uids = [prompt.uid for prompt in prompts]
        markers = self.queue.wait(uids, where={"status": ("finished", "failed", "dropped")})
        self.queue.clear(markers)
        rows: dict[str, list[int]] = defaultdict(list)
        everything = self.queue.list()
        for i, tags in enumerate(everything.tags):
            if "uid" in tags:
                rows[tags["uid"]].append(i)
        for uid, tags in zip(markers.keys, markers.tags, strict=True):
            ledger.failed_sessions += tags["failed_sessions"]
            ledger.retried_sessions += tags["retries"]
            if len(rows[uid]) != tags["rows"]:
                raise QueueError(f"prompt {uid} wrote {tags['rows']} rows, and the queue has {len(rows[uid])} of them")
        return [
            PromptGroup(uid, tags["status"], tags["error"], tags["failed_sessions"], everything.take(rows[uid]))
            for uid, tags in zip(markers.keys, markers.tags, strict=True)
        ]

    def _sort(self, group: PromptGroup, found: CollectedStep) -> None:
        """Keep the group, set it aside, or clear its rows."""
        policy = self.options.on_incomplete
        failed = group.status == "failed" and policy != "keep"
        if failed and policy == "error":
            raise TrainingAborted(
                f"prompt {group.uid} has a failed session: {group.why_left_out}. "
                'rollout.on_incomplete_group = "drop", "keep" or "refill" would go on'
            )
        if failed or group.status == "dropped" or not len(group.rows):
            outcome: LeftOutAs = "dropped" if group.status == "dropped" else "failed"
            found.ledger.failed_rows += self._leave_out(group, found, outcome, group.why_left_out)
            found.num_to_replace += policy == "refill"
            return
        if group.failed_sessions:
            self.report(SessionsLeftOut(found.number, group.uid, group.failed_sessions, group.why_left_out))
        if self.options.filter_groups and group.has_no_signal():
            found.without_signal.append(group)
        else:
            found.kept.append(group)

    def _chosen(self, found: CollectedStep) -> list[PromptGroup]:
        """The groups to train on. Out of rounds, groups without signal keep the batch's size if the config goes on."""
        spare = found.without_signal[: found.num_missing]
        if self._wants_more(found):
            event = ShortBatch(found.number, found.num_prompts, len(found.kept), len(spare), found.num_rounds)
            if self.options.on_short == "error":
                raise TrainingAborted(
                    f"{event.useful} of {event.wanted} groups after {event.rounds} rounds; raise "
                    'algorithm.filter_max_rounds, or set rollout.on_short_batch = "train" to go on with fewer'
                )
            self.report(event)
        for group in found.without_signal[found.num_missing :]:
            reason = "all sessions have the same reward (algorithm.filter_groups)"
            found.ledger.filtered_rows += self._leave_out(group, found, "dropped", reason)
        return found.kept + spare

    def _leave_out(self, group: PromptGroup, found: CollectedStep, outcome: LeftOutAs, reason: str) -> int:
        """Remove a group's rows from the queue and report why; returns how many there were."""
        if outcome == "failed":
            found.ledger.failed += 1
        else:
            found.ledger.dropped += 1
        if len(group.rows):
            self.queue.clear(group.rows)
        self.report(GroupLeftOut(found.number, group.uid, outcome, reason, len(group.rows)))
        return len(group.rows)
