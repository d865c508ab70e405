"""Which groups form a training batch: draw prompts, have them sampled, sort the groups that come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tqppo.data.prompts import Prompt
from tqppo.errors import TrainingAborted
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta

Incomplete = Literal["error", "drop", "keep", "refill"]
Generate = Callable[[Sequence[tuple[int, Prompt]]], None]


@dataclass(slots=True)
class PromptGroup:
    """The rows of one prompt, and the outcome that its marker gives."""

    uid: str
    status: str
    error: str
    rows: BatchMeta

    def has_no_signal(self) -> bool:
        """Whether all sessions earned the same reward, so that a group estimator gives each of them 0."""
        return len({tags["reward"] for tags in self.rows.tags}) <= 1


@dataclass(slots=True)
class SortedGroups:
    """The groups of a step so far, and how many rows were taken out."""

    kept: list[PromptGroup] = field(default_factory=list)
    without_signal: list[PromptGroup] = field(default_factory=list)  # spare: used if the rounds run out
    num_to_replace: int = 0
    num_filtered: int = 0
    num_failed: int = 0

    def metrics(self) -> Metrics:
        return {
            "training/filter_groups/evicted_samples": float(self.num_filtered),
            "training/rollout_failure/evicted_samples": float(self.num_failed),
        }


@dataclass(frozen=True)
class GroupCollector:
    """Collects whole groups from the queue, and replaces those that the config leaves out."""

    queue: Queue
    draw: Callable[[int], list[Prompt]]
    on_incomplete: Incomplete
    filter_groups: bool
    max_rounds: int

    def collect(self, num_prompts: int, generate: Generate) -> tuple[BatchMeta, Metrics]:
        """A batch of `num_prompts` groups in canonical order; its rows and no others are left in the queue."""
        found = SortedGroups()
        wanted, drawn = num_prompts, 0
        for _ in range(self.max_rounds):
            prompts = self.draw(wanted)
            generate(list(enumerate(prompts, start=drawn)))
            drawn += len(prompts)
            found.num_to_replace = 0
            self._sort(self._settled(prompts), found)
            wanted = num_prompts - len(found.kept) if found.num_to_replace or self.filter_groups else 0
            if wanted <= 0:
                break
        # Out of rounds: groups without signal keep the batch's size, and add nothing to the gradient.
        missing = max(0, wanted)
        kept = found.kept + found.without_signal[:missing]
        found.num_filtered += self._clear(found.without_signal[missing:])
        if not kept:
            raise TrainingAborted("no trajectories: every group of this step failed or was dropped")
        return BatchMeta.join([group.rows for group in kept]).in_order(), found.metrics()

    def _settled(self, prompts: Sequence[Prompt]) -> list[PromptGroup]:
        """The groups of these prompts, in order. Their markers are removed from the queue."""
        uids = [prompt.uid for prompt in prompts]
        markers = self.queue.wait(uids, where={"status": ("finished", "failed", "dropped")})
        self.queue.clear(markers)
        rows: dict[str, list[int]] = defaultdict(list)
        everything = self.queue.list()
        for i, tags in enumerate(everything.tags):
            if "uid" in tags:
                rows[tags["uid"]].append(i)
        return [
            PromptGroup(uid, tags["status"], tags["error"], everything.take(rows[uid]))
            for uid, tags in zip(markers.keys, markers.tags, strict=True)
        ]

    def _sort(self, groups: list[PromptGroup], found: SortedGroups) -> None:
        """Keep each group, set it aside, or clear its rows."""
        for group in groups:
            failed = group.status == "failed" and self.on_incomplete != "keep"
            if failed and self.on_incomplete == "error":
                raise TrainingAborted(
                    f"prompt {group.uid} has a failed session: {group.error or 'it returned no trajectory'}. "
                    'rollout.on_incomplete_group = "drop", "keep" or "refill" would go on'
                )
            if failed or group.status == "dropped" or not len(group.rows):
                found.num_failed += self._clear([group])
                found.num_to_replace += self.on_incomplete == "refill"
            elif self.filter_groups and group.has_no_signal():
                found.without_signal.append(group)
            else:
                found.kept.append(group)

    def _clear(self, groups: list[PromptGroup]) -> int:
        """Remove the groups' rows from the queue; returns how many there were."""
        for group in groups:
            if len(group.rows):
                self.queue.clear(group.rows)
        return sum(len(group.rows) for group in groups)
