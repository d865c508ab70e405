"""Run by `test_saved_parts.py`: an actor is trained, saved and loaded by several numbers of ranks in turn.

`python saving_ranks.py MODEL FOLDER TURN…`, where a turn is `RANKS/RANKS_PER_COPY/LOADS`: the turn whose state is
loaded, or -1 to train two steps. Each rank is a process, and forked: what takes seconds to import is imported once.
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


def one_rank(model: str, folder: str, turn: int, described: str, rank: int) -> None:
    """Load or train; then save, and say what was written."""
    torch.set_num_threads(1)
    size, ranks_per_copy, loads = map(int, described.split("/"))
    ranks = Ranks(rank, size)
    if size > 1:
        store = dist.FileStore(f"{folder}/{turn}.store", size)
        join(ranks, torch.device("cpu"), store, timeout_s=120, is_one_node=True)
    spec = RoleSpec(ModelSpec(model), optimizer=OptimizerSpec(lr=1e-2), ranks_per_copy=ranks_per_copy)
    actor = Actor(spec, ranks=ranks)
    actor.start()
    if loads >= 0:
        actor.load(f"{folder}/{loads}")
    else:
        own = {
            name: torch.nested.as_nested_tensor(list(each.unbind()[rank::size]), layout=torch.jagged)
            for name, each in rows().items()
        }
        for step in (1, 2):
            actor.train(own, step=step, sizes=[])
    written = actor.save(f"{folder}/{turn}")
    with open(f"{folder}/{turn}-{rank}.json", "w") as file:
        json.dump({name: asdict(digest) for name, digest in written.items()}, file)
    leave()


def main(model: str, folder: str, turns: list[str]) -> None:
    context = multiprocessing.get_context("fork")
    for turn, described in enumerate(turns):
        size = int(described.partition("/")[0])
        ranks = [context.Process(target=one_rank, args=(model, folder, turn, described, rank)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert [each.exitcode for each in ranks] == [0] * size


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
