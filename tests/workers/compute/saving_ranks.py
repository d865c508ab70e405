"""Run by `test_saved_parts.py`: an actor is saved and loaded by 1, 2, 4 and 1 ranks in turn; each is a process.

`python saving_ranks.py MODEL FOLDER`. The ranks are forked: what takes seconds to import is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from workers.compute.resting_rank import rows

from tqppo.workers.actor import Actor
from tqppo.workers.process.ranks import Ranks, join, leave
from tqppo.workers.specs import ModelSpec, OptimizerSpec, RoleSpec

SIZES = (1, 2, 4, 1)


def one_rank(model: str, folder: str, turn: int, rank: int) -> None:
    """Load what the ranks of the turn before saved, or train two steps; then save, and say what was written."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, SIZES[turn])
    if ranks.size > 1:
        store = dist.FileStore(f"{folder}/{turn}.store", ranks.size)
        join(ranks, torch.device("cpu"), store, timeout_s=120, is_one_node=True)
    actor = Actor(RoleSpec(ModelSpec(model), optimizer=OptimizerSpec(lr=1e-2)), ranks=ranks)
    actor.start()
    if turn:
        actor.load(f"{folder}/{turn - 1}")
    else:
        for step in (1, 2):
            actor.update(rows(), step=step)
    written = actor.save(f"{folder}/{turn}")
    with open(f"{folder}/{turn}-{rank}.json", "w") as file:
        json.dump({name: asdict(digest) for name, digest in written.items()}, file)
    leave()


def main(model: str, folder: str) -> None:
    context = multiprocessing.get_context("fork")
    for turn, size in enumerate(SIZES):
        ranks = [context.Process(target=one_rank, args=(model, folder, turn, rank)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert [each.exitcode for each in ranks] == [0] * size


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
