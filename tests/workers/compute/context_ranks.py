"""Run by `test_context.py`: the same rows on groups of ranks that share them in different ways; each rank is a process.

`python context_ranks.py FOLDER` leaves `FOLDER/LAYOUT/CASE/` with results, metrics and gradients. The ranks are forked:
what takes seconds to import is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from workers.conftest import rows_of
from workers.taught import LR_0, take

from tqppo.dataflow import Features
from tqppo.workers.actor import Actor
from tqppo.workers.compute.learner import Learner
from tqppo.workers.critic import Critic
from tqppo.workers.process.ranks import Ranks, join, leave
from tqppo.workers.specs import ModelSpec, PolicyLossSpec, RoleSpec, ValueLossSpec

LAYOUTS = {"1": (1, 1), "2x1": (2, 1), "1x2": (2, 2), "2x2": (4, 2)}  # ranks, and how many of them share a row
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Case:
    """What is trained: which heads it has, and what its loss needs of a row as a whole."""

    config: Any
    worker: type[Learner] = Actor
    loss: PolicyLossSpec = field(default_factory=PolicyLossSpec)
    model: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(
        LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=False),
        loss=PolicyLossSpec(kl_coef=0.1, entropy_coef=0.01),
    ),
    "sequence": Case(  # one key-value head for two ranks, and a ratio of whole sequences
        Qwen2Config(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
        loss=PolicyLossSpec(name="gspo", aggregate="seq-mean-token-mean"),
        model={"gradient_checkpointing": True},
    ),
    "critic": Case(LlamaConfig(**SHAPE, num_key_value_heads=4), worker=Critic),
}


def write_models(folder: Path) -> None:
    for name, case in CASES.items():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(case.config, dtype=torch.float32).save_pretrained(folder / name)


def one_rank(folder: Path, layout: str, rank: int) -> None:
    torch.set_num_threads(1)
    size, context = LAYOUTS[layout]
    ranks = Ranks(rank, size, context)
    if size > 1:
        store = dist.FileStore(str(folder / f"{layout}.store"), size)
        join(ranks, torch.device("cpu"), store, timeout_s=120, is_one_node=True)
    groups = size // context
    # Of two groups, the second has one row only, and idles while the first computes the others.
    order = list(range(8)) if groups == 1 else [[*range(7)], [7]][rank // context]
    rows = take(rows_of([3, 9, 1, 5, 2, 7, 4, 30], [4, 1, 7, 12, 3, 3, 40, 6]), order)
    for name, case in CASES.items():
        run(folder / layout / name, name, case, ranks, rows, order)
    if size > 1:
        leave()


def run(folder: Path, name: str, case: Case, ranks: Ranks, rows: Any, order: list[int]) -> None:
    spec = RoleSpec(
        ModelSpec(str(folder.parents[1] / name), **case.model),
        features=Features(kl_in_loss=case.loss.kl_coef > 0),
        optimizer=LR_0,  # leaves the gradient in its state
        policy_loss=case.loss,
        value_loss=ValueLossSpec(),
        micro_batch_tokens=24,
        context_parallel=ranks.context,
    )
    worker: Any = case.worker(spec, ranks=ranks)
    worker.start()
    (found,) = (worker.values(rows) if case.worker is Critic else worker.old_logprobs(rows)).values()
    metrics = worker.update(rows, step=1)
    worker.save(str(folder))
    results = dict(zip(order, (each.tolist() for each in found.unbind()), strict=True))
    (folder / f"{ranks.rank}.json").write_text(json.dumps({"results": results, "metrics": metrics}))


def main(folder: Path) -> None:
    write_models(folder)
    context = multiprocessing.get_context("fork")
    for layout, (size, _) in LAYOUTS.items():
        ranks = [context.Process(target=one_rank, args=(folder, layout, rank)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert [each.exitcode for each in ranks] == [0] * size


if __name__ == "__main__":
    main(Path(sys.argv[1]))
