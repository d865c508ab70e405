"""The stages of a step one by one: padding costs at most one put, and any declared column passes through a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from trainers.fakes import PROMPT, RESPONSE, FakeEngines, fake_run

from tqppo.columns import Column, Kind, declare
from tqppo.data.prompts import Prompt
from tqppo.errors import DataError
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.trainers.side_by_side import Clock
from tqppo.trainers.stages import PaddingStage, agent_metrics, tag_metrics

LAYERS, TOP_K, PATCH = 3, 2, 4


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


@dataclass
class CountingQueue:
    """A queue that counts puts and remembers what was read."""

    queue: Queue
    puts: list[int] = field(default_factory=list)
    gets: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def put(self, keys: Any, columns: Any, **named: Any) -> BatchMeta:
        self.puts.append(len(keys))
        return self.queue.put(keys, columns, **named)

    def get(self, batch: BatchMeta, columns: Sequence[str]) -> Any:
        self.gets.append((len(batch), tuple(columns)))
        return self.queue.get(batch, columns)


def put_rewards(queue: Queue, count: int) -> BatchMeta:
    tags = [{"uid": "p0", "session": i, "trajectory": 0, "seq_len": 2} for i in range(count)]
    return queue.put([f"p0_{i}_0" for i in range(count)], {"reward": torch.ones(count)}, tags=tags)


@pytest.mark.parametrize(("rows", "expected"), [(8, []), (5, [3]), (1, [7])])
def test_padding_is_one_put_and_none_where_nothing_is_missing(queue: Queue, rows: int, expected: list[int]) -> None:
    counting: Any = CountingQueue(queue)
    batch, metrics = PaddingStage(counting, Clock(), 8).fill(put_rewards(queue, rows), 4)
    assert counting.puts == expected
    assert counting.gets == []
    assert len(batch) == 8
    assert metrics == {
        "padding/rows": float(8 - rows),
        "padding/fraction": (8 - rows) / 8,
        "padding/multiple": 8.0,
    }
    assert [tags.get("is_padding", False) for tags in batch.tags] == [False] * rows + [True] * (8 - rows)


def test_a_batch_without_trajectories_is_never_filled_with_padding(queue: Queue) -> None:
    with pytest.raises(DataError, match="no trajectories"):
        PaddingStage(queue, Clock(), 8).fill(put_rewards(queue, 1).take([]), 1)


class RichEngines(FakeEngines):
    """Rows as of a model that sees images and routes tokens to experts."""

    def generate(self, prompts: Sequence[tuple[int, Prompt]], task: Any) -> Any:
        report = super().generate(prompts, task)
        rows = self.queue.list(where={"is_prompt": None})
        length = PROMPT + RESPONSE
        columns = {
            "step_position_ids": [torch.arange(4 * length).view(4, length) for _ in rows.keys],
            "step_routed_experts": [torch.ones(length, LAYERS, TOP_K, dtype=torch.int16) for _ in rows.keys],
            "step_patches": [torch.ones(i % 3, PATCH) for i, _ in enumerate(rows.keys)],
        }
        self.queue.put(rows, columns)
        return report


def test_columns_of_images_and_experts_pass_through_a_whole_step(queue: Queue) -> None:
    """(4, S) position ids, (S, layers, k) experts and patches of their own length, on real rows and on padding."""
    declare(Column("step_position_ids", Kind.SEQUENCE, "int64", trailing=(4,), ragged_dim=1))
    declare(Column("step_routed_experts", Kind.SEQUENCE, "int16", trailing=(None, None)))
    declare(Column("step_patches", Kind.RAGGED, "float32", trailing=(None,)))
    run = fake_run(
        queue, None, "data.batch_size=3", "rollout.group_size=2", "actor.mini_batch_size=2", engines=RichEngines
    )
    seen: dict[str, list[tuple[int, ...]]] = {}
    run.actor.before_update = lambda batch: seen.update(shapes(queue, batch))
    metrics = run.trainer.step(1)
    assert metrics["padding/rows"] == 2
    length = PROMPT + RESPONSE
    assert seen == {
        "step_position_ids": [(4, length)] * 6 + [(4, 2)] * 2,
        "step_routed_experts": [(length, LAYERS, TOP_K)] * 6 + [(2, LAYERS, TOP_K)] * 2,
        "step_patches": [(i % 3, PATCH) for i in range(6)] + [(0, PATCH)] * 2,
    }
    assert len(queue.list()) == 0


def shapes(queue: Queue, batch: BatchMeta) -> dict[str, list[tuple[int, ...]]]:
    names = [name for name in batch.columns if name.startswith("step_")]
    return {name: [tuple(row.shape) for row in column.unbind()] for name, column in queue.get(batch, names).items()}


def test_turns_and_reward_numbers_count_sessions_and_what_tools_did_is_summed() -> None:
    def tag(session: int, trajectory: int, **more: Any) -> dict[str, Any]:
        return {"uid": "p0", "session": session, "trajectory": trajectory, "turns": 1 + trajectory, **more}

    tags = [
        tag(0, 0, extra={"acc": 1.0}, metrics={"depth": 1.0}),
        tag(0, 1, extra={"acc": 1.0}, metrics={"depth": 3.0}, counts={"tool/search/calls": 2.0}),
        tag(1, 0, extra={"acc": 0.0}, counts={"tool/search/calls": 1.0, "tool/search/errors": 1.0}),
    ]
    found = tag_metrics(tags)
    assert found["training/num_turns/mean"] == 1.5
    assert found["reward/acc/mean"] == 0.5
    assert found["tool/search/calls"] == 3.0
    assert found["tool/search/errors"] == 1.0
    assert found["agent/depth/mean"] == 2.0
    assert agent_metrics(tags, num_sessions=2)["agent/turns"] == 2.0
    assert found["agent/retokenized_tokens"] == 0.0
