"""A training step of the actor against the same step on padded batches, and against a bare forward/backward loop.

`make bench-update`. Workloads: rows like the quickstart's (256 of about 13 tokens), rows of 16–512 tokens, and both
kinds in groups of 8 with one prompt, which the actor computes once for all eight. "× rows apart" is what sharing
prompts (workers/compute/shared_prompts.py) buys: the same update with every row in a forward row of its own.
The bare loop gets the cuts ready-made and does nothing but forward, backward, clip and AdamW.

Two more tables show what stays simple: the share of an update that the policy loss takes, which bounds what derivatives
worked out by hand could gain, and the imbalance that the greedy split over ranks leaves, which bounds what a finer
search could gain. The last table shows the one derivative that is written by hand, that of a divergence over the whole
vocabulary, against automatic differentiation: its time, and the bytes that it keeps for the backward pass.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import interleaved, publish, show
from torch import Tensor

from tqppo.algorithms import balance, whole_vocabulary
from tqppo.algorithms.layout import to_nested
from tqppo.algorithms.losses import POLICY_LOSSES, PolicyOptions, PolicyTokens
from tqppo.tiny.model import write_tiny_model
from tqppo.workers.actor import Actor
from tqppo.workers.compute import microbatch
from tqppo.workers.compute.microbatch import FlatRows, MicroBatch, MicroBatchCut
from tqppo.workers.specs import ModelSpec, OptimizerSpec, RoleSpec

MINI_BATCHES = 2
BUDGET = 16_384


def make_rows(sequences: list[int], responses: list[int], *, group: int = 1) -> dict[str, Any]:
    """FlatRows of these lengths; each `group` of them begins with one prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths, total = torch.tensor(responses), sum(responses)
    tokens = torch.randint(0, 256, (sum(sequences),), generator=generator)
    starts = [0, *torch.tensor(sequences).cumsum(0).tolist()]
    for row in range(len(sequences)):
        first, prompt = row - row % group, sequences[row] - responses[row]
        tokens[starts[row] : starts[row] + prompt] = tokens[starts[first] : starts[first] + prompt]
    values = {
        "response_mask": torch.ones(total, dtype=torch.bool),
        "old_logprobs": torch.full((total,), -5.5),
        "advantages": torch.randn(total, generator=generator),
    }
    return {
        "tokens": to_nested(tokens, torch.tensor(sequences)),
        **{name: to_nested(value, lengths) for name, value in values.items()},
    }


class PaddedActor(Actor):
    """The same actor, its rows in the order they come and padded to the longest of the batch."""

    def micro_batches(self, rows: FlatRows, chosen: torch.Tensor) -> list[MicroBatchCut]:
        self.width = int(rows.lengths.max()) - 1
        return [MicroBatchCut.apart(part) for part in chosen.split(max(1, self.spec.micro_batch_tokens // self.width))]

    def build(self, rows: FlatRows, cut: MicroBatchCut, keep: torch.Tensor | None = None) -> MicroBatch:
        return microbatch.build(rows, cut, keep=keep, width=self.width)


def bare_loop(actor: Actor, rows: dict[str, Any]) -> Callable[[], None]:
    """Forward and backward over the cuts that the actor would choose, worked out beforehand."""
    flat = FlatRows.of(rows)
    halves = [
        [microbatch.build(flat, cut) for cut in actor.micro_batches(flat, half)]
        for half in torch.arange(len(flat)).tensor_split(MINI_BATCHES)
    ]
    model: Any = actor.model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def run() -> None:
        for micros in halves:
            for micro in micros:
                hidden = model.causal_lm.model(input_ids=micro.input_ids, use_cache=False).last_hidden_state
                logits = model.causal_lm.lm_head(hidden.flatten(0, 1).index_select(0, micro.outputs))
                torch.nn.functional.cross_entropy(logits, micro.targets, reduction="sum").backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def times(count: int, run: Callable[[], Any]) -> Callable[[], None]:
    """Short runs several times over: the clock of CPU-seconds ticks a hundred times a second."""

    def repeated() -> None:
        for _ in range(count):
            run()

    return repeated


def measure(name: str, rows: dict[str, Any], *, count: int, repeats: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = ModelSpec(str(write_tiny_model(folder)))
        spec = RoleSpec(model, optimizer=OptimizerSpec(lr=1e-6), micro_batch_tokens=BUDGET)
        ours, padded, apart = Actor(spec), PaddedActor(spec), Actor(spec)
        for actor in (ours, padded, apart):
            actor.start()
        apart.attention_pairs_per_token = 0  # no row shares its prompt
    half = len(rows["tokens"]) // MINI_BATCHES
    sizes = [half] * MINI_BATCHES
    alternatives = {
        "ours": lambda: ours.update(rows, step=1, sizes=sizes),
        "padded": lambda: padded.update(rows, step=1, sizes=sizes),
        "apart": lambda: apart.update(rows, step=1, sizes=sizes),
        "bare": bare_loop(apart, rows),
    }
    timings = interleaved({key: times(count, run) for key, run in alternatives.items()}, repeats=repeats)
    tokens = int(rows["tokens"].offsets()[-1])
    cpu = {key: timing.cpu / count for key, timing in timings.items()}
    against = [cpu[other] / cpu["ours"] for other in ("padded", "apart", "bare")]
    return [name, tokens, tokens / cpu["ours"], cpu["ours"], *against]


def loss_shares() -> list[tuple[Any, ...]]:
    """Forward and backward of the loss alone, on as many tokens as the update has, against the whole update."""
    draw = random.Random(0)
    short, longer = [draw.randint(11, 15) for _ in range(256)], [draw.randint(16, 128) for _ in range(32)]
    return [
        loss_share("quickstart", make_rows(short, [n - 7 for n in short]), {}),
        loss_share(
            "10M", make_rows(longer, [n - 8 for n in longer]), {"hidden_size": 320, "num_layers": 8, "num_heads": 5}
        ),
    ]


def loss_share(name: str, rows: dict[str, Any], sizes: dict[str, Any]) -> tuple[Any, ...]:
    with tempfile.TemporaryDirectory() as folder:
        model = ModelSpec(str(write_tiny_model(folder, **sizes)))
        actor = Actor(RoleSpec(model, optimizer=OptimizerSpec(lr=1e-6), micro_batch_tokens=BUDGET))
        actor.start()
    lengths = rows["advantages"].offsets().diff()
    logprobs = torch.full((int(lengths.sum()),), -5.5).requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    given = PolicyTokens(logprobs, rows["old_logprobs"].values(), rows["advantages"].values(), mask, lengths)

    def loss() -> None:
        for _ in range(100):
            POLICY_LOSSES["ppo"](given, PolicyOptions()).losses.sum().backward()

    timings = interleaved({"update": lambda: actor.update(rows, step=1), "loss": loss}, repeats=5)
    update_s, loss_s = timings["update"].cpu, timings["loss"].cpu / 100
    return name, update_s * 1e3, loss_s * 1e3, loss_s / update_s


def imbalances() -> list[tuple[Any, ...]]:
    draw = random.Random(0)
    lengths = {
        "16–512, uniform": [draw.randint(16, 512) for _ in range(256)],
        "about 500, log-normal": [min(8000, int(draw.lognormvariate(6, 0.9)) + 16) for _ in range(256)],
    }
    found = []
    for name, each in lengths.items():
        costs = [float(balance.workload(n)) for n in each]
        for ranks in (2, 4, 8):
            in_order = [list(part) for part in torch.arange(len(costs)).tensor_split(ranks)]
            found.append((name, ranks, imbalance(costs, in_order), imbalance(costs, balance.partition(costs, ranks))))
    return found


def imbalance(costs: list[float], parts: list[list[int]]) -> float:
    sums = [sum(costs[int(i)] for i in part) for part in parts]
    return max(sums) * len(sums) / sum(sums) - 1


def divergences(num_tokens: int = 512, vocabulary: int = 32_768) -> list[tuple[Any, ...]]:
    given, theirs = torch.randn(num_tokens, vocabulary).requires_grad_(), torch.randn(num_tokens, vocabulary)

    def by_hand(kind: str) -> Tensor:
        return whole_vocabulary.divergence(kind, given, theirs)

    def automatic(kind: str) -> Tensor:
        log_q, log_p = given.log_softmax(1), theirs.log_softmax(1)
        return (log_p.exp() * (log_p - log_q) if kind == "forward_kl" else log_q.exp() * (log_q - log_p)).sum(1)

    ways = {"auto": automatic, "hand": by_hand}
    found = []
    for kind in whole_vocabulary.KINDS:
        torch.testing.assert_close(by_hand(kind), automatic(kind), atol=1e-4, rtol=1e-4)
        timings = interleaved({name: partial(_backward, each, kind) for name, each in ways.items()}, repeats=5)
        kept = {name: kept_bytes(partial(each, kind)) / 2**20 for name, each in ways.items()}
        found.append((kind, timings["auto"].cpu / timings["hand"].cpu, kept["auto"], kept["hand"]))
    return found


def _backward(loss: Callable[[str], Tensor], kind: str) -> None:
    loss(kind).sum().backward()


def kept_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, each tensor once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    found = sum(kept.values())
    del result
    return found


def main() -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    short = [draw.randint(11, 15) for _ in range(256)]
    mixed = [draw.randint(16, 512) for _ in range(64)]
    answers = [draw.randint(8, 24) for _ in range(128)]
    rows = [
        measure("256 rows of 11–15 tokens", make_rows(short, [n - 7 for n in short]), count=5, repeats=9),
        measure("the same, 8 a prompt of 7", make_rows(short, [n - 7 for n in short], group=8), count=5, repeats=9),
        measure("64 rows of 16–512 tokens", make_rows(mixed, [n - 8 for n in mixed]), count=1, repeats=5),
        measure(
            "128 rows, 8 a prompt of 64", make_rows([64 + n for n in answers], answers, group=8), count=1, repeats=5
        ),
    ]
    ratios = ("× padded (≥ 1.5)", "× rows apart", "× bare loop (≥ 0.9)")
    header = ("update, 2 mini-batches", "tokens", "tokens/CPU-s", "CPU-s", *ratios)
    names = ("workload", "tokens", "tokens_per_cpu_s", "cpu_s", "vs_padded", "vs_apart", "vs_bare")
    figures = [dict(zip(names, row, strict=True)) for row in rows]
    publish("update", "actor.update, one thread, CPU-seconds", header, rows, figures)
    show("share of the policy loss in an update", ("model", "update ms", "loss ms", "share (≤ 0.1)"), loss_shares())
    show(
        "imbalance over ranks: longest over mean − 1, of 256 rows",
        ("lengths", "ranks", "in order", "greedy (≤ 0.1)"),
        imbalances(),
    )
    show(
        "divergence over a vocabulary of 32,768, 512 tokens: written by hand",
        ("divergence", "× automatic, CPU", "automatic keeps MiB", "by hand MiB"),
        divergences(),
    )


if __name__ == "__main__":
    main()
