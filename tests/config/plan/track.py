"""Measures the memory of a training worker without a GPU: true shapes, fake tensors, a fake process group.

`python tests/config/plan/track.py` writes tracked.json, which tests compare with the plan; it takes some minutes. Each
figure is the peak of `FSDPMemTracker` in the second of two updates of two micro-batches each, computed from the peaks
with four and with six layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from tqppo.config.plan.shapes import shape_of
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.microbatch import MicroBatch
from tqppo.workers.compute.model import PolicyModel, shard

TRACKED = Path(__file__).with_name("tracked.json")
LAYERS = (4, 6)  # with fewer, gradients of embedding and output layer make the peak instead of a layer's activations
ROW = 2048  # tokens of a row, three quarters of them in its response


@dataclass(frozen=True, slots=True)
class TrackedCase:
    """A worker's model and how it is held. The fields are those of `memory.Training`."""

    model: str
    ranks: int
    micro_batch_tokens: int
    learns: bool = True
    checkpointing: bool = True


CASES = [
    TrackedCase("Qwen/Qwen2.5-0.5B", 1, 8192),
    TrackedCase("Qwen/Qwen2.5-0.5B", 1, 8192, learns=False),
    TrackedCase("Qwen/Qwen2.5-0.5B", 1, 8192, checkpointing=False),
    TrackedCase("Qwen/Qwen2.5-1.5B", 2, 16_384),
    TrackedCase("Qwen/Qwen2.5-1.5B", 2, 16_384, learns=False),
    TrackedCase("Qwen/Qwen2.5-7B", 8, 16_384),
    TrackedCase("Qwen/Qwen2.5-7B", 8, 4096),
    TrackedCase("Qwen/Qwen2.5-7B", 8, 16_384, checkpointing=False),
    TrackedCase("Qwen/Qwen2.5-7B", 8, 32_768, learns=False),
    TrackedCase("meta-llama/Llama-3.1-8B", 8, 16_384),
    TrackedCase("meta-llama/Llama-3.1-8B", 8, 16_384, learns=False),
    TrackedCase("Qwen/Qwen2.5-32B", 32, 16_384),
    TrackedCase("Qwen/Qwen2.5-32B", 32, 16_384, learns=False),
]


class PhaseTracker(FSDPMemTracker):
    """Keeps the peak of each phase, and the sizes of the largest tensors at the last one, to explain it."""

    phase = ""

    def start(self, phase: str) -> None:
        self.phase = phase

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        now = sum(snap["Total"] for snap in self._curr_mem_snap.values())
        peaks = self.__dict__.setdefault("peaks", Counter())
        if now > peaks[self.phase]:
            peaks[self.phase] = now
            sizes = Counter(f"{info.reftype.value} {info.mem_consumed}" for info, _ in self._WINFO.values())
            self.__dict__.setdefault("largest", {})[self.phase] = sizes


def model_config(name: str, layers: int) -> PretrainedConfig:
    shape = shape_of(name)
    assert shape is not None, name
    family = LlamaConfig if "llama" in name.lower() else Qwen2Config
    return family(
        hidden_size=shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
    )


def micro_batch(tokens: int) -> MicroBatch:
    rows = tokens // ROW
    scored = torch.zeros(rows * ROW * 3 // 4, dtype=torch.int64)
    ids = torch.zeros(rows, ROW, dtype=torch.int64)
    return MicroBatch(ids, None, None, scored, scored, scored, scored, ids[:, 0])


def sharded(case: TrackedCase, layers: int) -> nn.Module:
    """The worker's own model, sharded as workers do it, without memory for its parameters."""
    dtype = torch.float32 if case.learns else torch.bfloat16
    with torch.device("meta"):
        config = model_config(case.model, layers)
        causal_lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if case.learns and case.checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        causal_lm.train()
    model = PolicyModel(causal_lm)
    model.requires_grad_(case.learns)
    return shard(model, torch.device("cpu"), torch.bfloat16)


def peaks(case: TrackedCase, layers: int, *, verbose: bool) -> dict[str, int]:
    """The most bytes of one rank in each phase."""
    model = sharded(case, layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        micro = micro_batch(case.micro_batch_tokens)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True) if case.learns else None
        with PhaseTracker(model, optimizer) as tracker:
            for update in range(2):
                for _ in range(2):
                    tracker.reset_mod_stats()
                    tracker.start(f"compute {update}")
                    compute(model, micro, case.learns)
                if optimizer is not None:
                    tracker.start(f"optimizer {update}")
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
    found: dict[str, int] = tracker.__dict__["peaks"]
    if verbose:
        explain(tracker.__dict__["largest"])
    return {name.removesuffix(" 1"): number for name, number in found.items() if name.endswith(" 1")}


def compute(model: nn.Module, micro: MicroBatch, learns: bool) -> None:
    with torch.set_grad_enabled(learns):
        logprobs, _, _ = model(micro, Scoring(1.0, with_entropy=learns))
    if learns:
        logprobs.sum().backward()


def explain(largest: dict[str, Counter[str]]) -> None:
    for phase, sizes in largest.items():
        if phase.endswith(" 1"):
            rows = sorted(sizes.items(), key=lambda each: -each[1] * int(each[0].rpartition(" ")[2]))
            sys.stdout.write(f"  {phase}\n")
            for what, count in rows[:16]:
                kind, _, size = what.rpartition(" ")
                sys.stdout.write(f"    {count:4} × {int(size) / 2**30:8.4f} GiB {kind}\n")


def extrapolated(case: TrackedCase, *, verbose: bool) -> int:
    """The peak with all layers: in each phase every further layer adds the same."""
    few, more = (peaks(case, layers, verbose=verbose) for layers in LAYERS)
    shape = shape_of(case.model)
    assert shape is not None, case.model
    return max(
        few[phase] + (more[phase] - few[phase]) // (LAYERS[1] - LAYERS[0]) * (shape.layers - LAYERS[0]) for phase in few
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("words", nargs="*", help="only cases that have one of these words")
    arguments.add_argument("--table", type=Path, default=TRACKED)
    arguments.add_argument("-v", action="store_true", help="show the largest tensors at each peak")
    given = arguments.parse_args()
    found = json.loads(given.table.read_text()) if given.table.exists() else []
    for case in CASES:
        if given.words and not any(word in str(case) for word in given.words):
            continue
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
        num_bytes = extrapolated(case, verbose=given.v)
        dist.destroy_process_group()
        sys.stdout.write(f"{num_bytes / 2**30:7.2f} GiB  {case}\n")
        sys.stdout.flush()
        found = [each for each in found if TrackedCase(**each["case"]) != case]
        found.append({"case": asdict(case), "bytes": num_bytes})
        given.table.write_text("[\n" + ",\n".join(json.dumps(each) for each in found) + "\n]\n")


if __name__ == "__main__":
    main()
