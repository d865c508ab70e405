"""Run by `test_loading.py` as one process per rank: loads a model in several forms, and compares it with its files.

`python loading_rank.py MODEL FOLDER SIZE RANK CASE…` writes what it found to `FOLDER/RANK.json`.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tqppo.weights.shards import whole
from tqppo.workers.actor import Actor
from tqppo.workers.compute.worker import Worker
from tqppo.workers.critic import Critic
from tqppo.workers.process.ranks import Ranks, join, leave
from tqppo.workers.reference import Reference
from tqppo.workers.specs import ModelSpec, RoleSpec


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tokens() -> dict[str, Tensor]:
    return {
        "tokens": torch.nested.nested_tensor([torch.arange(7), torch.arange(5)], layout=torch.jagged),
        "response_mask": torch.nested.nested_tensor([torch.ones(3, dtype=torch.bool)] * 2, layout=torch.jagged),
    }


def compare(worker: Worker, expected: nn.Module, dtype: torch.dtype) -> None:
    """Every parameter has the file's bits; tied ones are one tensor, and the model computes."""
    state = expected.state_dict()
    for name, parameter in worker.model.named_parameters():
        key = name.partition(".")[2].replace(".base_layer.", ".")
        found = whole(parameter)
        if "lora_" in name or "value_head" in name:
            assert found.dtype == torch.float32, name
            continue
        match = key if key in state else f"model.{key}"
        assert found.dtype == dtype, name
        assert torch.equal(found, state[match].to(dtype)), name


def main(model: str, folder: Path, ranks: Ranks, cases: list[str]) -> None:
    torch.set_num_threads(1)
    join(ranks, torch.device("cpu"), dist.FileStore(str(folder / "store"), ranks.size), timeout_s=120, is_one_node=True)
    spec = RoleSpec(ModelSpec(model, dtype="bfloat16"))
    found: dict[str, float] = {}
    if "memory" in cases:
        before = peak_bytes()
        actor = Actor(replace(spec, model=ModelSpec(model, dtype="float32")), ranks=ranks)
        actor.start()
        found["peak_bytes"] = peak_bytes() - before
    else:
        compare_all(spec, ranks, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), cases)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    leave()


def compare_all(spec: RoleSpec, ranks: Ranks, expected: nn.Module, cases: list[str]) -> None:
    roles = {
        "actor": (Actor(spec, ranks=ranks), torch.float32),
        "critic": (Critic(spec, ranks=ranks), torch.float32),
        "frozen": (Reference(spec, ranks=ranks), torch.bfloat16),
        "lora": (Actor(replace(spec, model=replace(spec.model, lora_rank=2)), ranks=ranks), torch.bfloat16),
    }
    for name in cases:
        worker, dtype = roles[name]
        worker.start()
        compare(worker, expected, dtype)
        if isinstance(worker, Actor):
            worker.old_logprobs(tokens())
            worker.publisher.close()
        elif isinstance(worker, Critic):
            worker.values(tokens())
        else:
            worker.logprobs(tokens())


if __name__ == "__main__":
    size, rank = int(sys.argv[3]), int(sys.argv[4])
    main(sys.argv[1], Path(sys.argv[2]), Ranks(rank, size), sys.argv[5:])
