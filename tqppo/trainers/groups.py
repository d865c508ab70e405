"""Which groups form a training batch: draws prompts, has them sampled, judges the groups that come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tqppo.data.prompts import Prompt
from tqppo.errors import TrainingAborted
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta

Incomplete = Literal["error", "drop", "keep", "refill"]
Generate = Callable[[Sequence[tuple[int, Prompt]]], None]


@dataclass(slots=True)
class Group:
    """The rows of one prompt, and what its marker says."""

    uid: str
    status: str
    error: str
    rows: BatchMeta

    def has_no_signal(self) -> bool:
        """Whether all sessions earned the same: a group estimator would give every one of them 0."""
        return len({tags["reward"] for tags in self.rows.tags}) <= 1


class Replay:
    """Collects whole groups from the queue. `counts` says what happened to the others in the last step."""

    def __init__(
        self,
        queue: Queue,
        draw: Callable[[int], list[Prompt]],
        *,
        on_incomplete: Incomplete,
        filter_groups: bool,
        max_rounds: int,
    ) -> None:
        self.queue = queue
        self.draw = draw
        self.on_incomplete = on_incomplete
        self.filter_groups = filter_groups
        self.max_rounds = max_rounds
        self.counts: dict[str, float] = {}

    def collect(self, num_prompts: int, generate: Generate) -> BatchMeta:
        """A batch of `num_prompts` groups in canonical order; its rows and no others are left in the queue."""
        self.counts = {"training/filter_groups/evicted_samples": 0.0, "training/rollout_failure/evicted_samples": 0.0}
        kept: list[Group] = []
        spare: list[Group] = []
        wanted, drawn = num_prompts, 0
        for _ in range(self.max_rounds):
            prompts = self.draw(wanted)
            generate(list(enumerate(prompts, start=drawn)))
            drawn += len(prompts)
            refill = self._judge(self._settled(prompts), kept, spare)
            wanted = num_prompts - len(kept) if refill or self.filter_groups else 0
            if wanted <= 0:
                break
        kept += spare[: max(0, wanted)]  # out of rounds: groups without signal keep the batch's size, and add nothing
        self._evict(spare[max(0, wanted) :], "filter_groups")
        if not kept:
            raise TrainingAborted("no trajectories: every group of this step failed or was dropped")
        return BatchMeta.join([group.rows for group in kept]).in_order()

    def _settled(self, prompts: Sequence[Prompt]) -> list[Group]:
        """The groups of these prompts, in order; the markers leave the queue here."""
        uids = [prompt.uid for prompt in prompts]
        markers = self.queue.wait(uids, where={"status": ("finished", "failed", "dropped")})
        self.queue.clear(markers)
        rows: dict[str, list[int]] = defaultdict(list)
        everything = self.queue.list()
        for i, tags in enumerate(everything.tags):
            if "uid" in tags:
                rows[tags["uid"]].append(i)
        return [
            Group(uid, tags["status"], tags["error"], everything.take(rows[uid]))
            for uid, tags in zip(markers.keys, markers.tags, strict=True)
        ]

    def _judge(self, groups: list[Group], kept: list[Group], spare: list[Group]) -> int:
        """Sort groups into kept and spare, clear the dropped ones; returns how many want a replacement."""
        refill = 0
        for group in groups:
            failed = group.status == "failed" and self.on_incomplete != "keep"
            if failed and self.on_incomplete == "error":
                raise TrainingAborted(
                    f"prompt {group.uid} has a failed session: {group.error or 'it returned no trajectory'}. "
                    'rollout.on_incomplete_group = "drop", "keep" or "refill" would go on'
                )
            if failed or group.status == "dropped" or not len(group.rows):
                self._evict([group], "rollout_failure")
                refill += self.on_incomplete == "refill"
            elif self.filter_groups and group.has_no_signal():
                spare.append(group)
            else:
                kept.append(group)
        return refill

    def _evict(self, groups: list[Group], cause: str) -> None:
        for group in groups:
            self.counts[f"training/{cause}/evicted_samples"] += len(group.rows)
            if len(group.rows):
                self.queue.clear(group.rows)
