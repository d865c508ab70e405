"""Run by `test_residence.py` as one process per rank: two updates, once straight on and once with rests in between.

`python resting_rank.py MODEL FOLDER RANK`, with two ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tqppo.workers.actor import Actor
from tqppo.workers.process.ranks import Ranks, join, leave
from tqppo.workers.specs import ModelSpec, OptimizerSpec, RoleSpec


def jagged(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(values, layout=torch.jagged)


def rows() -> dict[str, torch.Tensor]:
    columns = {
        "tokens": jagged([torch.arange(6) + i for i in range(4)]),
        "response_mask": jagged([torch.ones(3, dtype=torch.bool)] * 4),
    }
    small = [torch.full((3,), 0.1 * (i + 1)) for i in range(4)]
    return columns | {name: jagged(small) for name in ("old_logprobs", "advantages")}


def main(model: str, folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    for name in ("plain", "rested"):
        store = dist.FileStore(f"{folder}/{name}.store", 2)
        join(Ranks(rank, 2), torch.device("cpu"), store, timeout_s=120, is_one_node=True)
        spec = RoleSpec(ModelSpec(model, dtype="bfloat16"), optimizer=OptimizerSpec(lr=1e-2))
        actor = Actor(spec, ranks=Ranks(rank, 2))
        actor.start()
        for step in (1, 2):
            rest(actor, is_resting=name == "rested")
            actor.update(rows(), step=step)
        rest(actor, is_resting=name == "rested")
        actor.save(f"{folder}/{name}")
        leave()


def rest(actor: Actor, *, is_resting: bool) -> None:
    if is_resting:
        actor.rest()
        assert actor.held_bytes() == 0
        actor.resume()
        assert actor.held_bytes() > 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
