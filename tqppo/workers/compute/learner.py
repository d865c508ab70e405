"""The training loop that actor and critic share: mini-batches, micro-batches, exact normalisers, optimizer, state."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tqppo.algorithms.aggregate import Normalisers
from tqppo.errors import CheckpointError, PreflightError
from tqppo.protocols import Metrics
from tqppo.weights import file as tensorfile
from tqppo.weights.file import Entry
from tqppo.weights.shards import like, whole
from tqppo.workers.compute.microbatch import MicroBatch, Rows
from tqppo.workers.compute.optimizer import Optimizer, learning_rate
from tqppo.workers.compute.worker import Worker, followed_by_none, idle_micro_batch
from tqppo.workers.process.bridge import Columns


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's share of the mini-batch's loss, and what to report.

    `parts` are shares too, and add up; `sums` are over tokens, and are divided by the tokens trained on.
    """

    value: Tensor
    parts: Mapping[str, Tensor]
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens and rows of an update count, worked out once."""

    keep: Tensor  # [ΣR] bool: tokens in the loss
    counts: Tensor  # [B] how many of them a row has
    active: Tensor  # [B] bool: rows that can have a gradient; the others need no forward
    weights: Tensor  # [B] session weights


@dataclass(frozen=True, slots=True)
class Tokens:
    """The counted tokens of one micro-batch: N of them, in `lengths` [b] per row."""

    response: Mapping[str, Tensor]
    places: Tensor
    mask: Tensor  # [N], all true
    lengths: Tensor
    session_weights: Tensor | None  # [b]

    def column(self, name: str) -> Tensor:
        return self.response[name][self.places].to(self.mask.device)


@dataclass(slots=True)
class Tally:
    """Numbers of one update, on this rank: means over mini-batches of what adds up over micro-batches and ranks."""

    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    grad_norms: list[float] = field(default_factory=list)
    num_trained: int = 0
    num_skipped: int = 0
    num_all_padding: int = 0
    num_without_signal: int = 0

    def add(self, loss: Loss, tokens: float) -> None:
        names = [*loss.parts, *loss.sums]
        values = torch.stack([t.detach().float() for t in (*loss.parts.values(), *loss.sums.values())]).tolist()
        for name, value in zip(names, values, strict=True):
            self.totals[name] += value if name in loss.parts else value / tokens


class Learner(Worker):
    """A worker whose model learns. Roles give `_loss`, `_selection` and `report_names`."""

    prefix = ""  # of the metrics: "actor", "critic"

    @property
    def report_names(self) -> tuple[str, ...]:
        """What `_loss` reports, known also to a rank that has no rows."""
        raise AssertionError("a role says what it reports")

    def start(self) -> None:
        if self.dtype == torch.float16:
            raise PreflightError("model.dtype float16 cannot train: gradients underflow; use bfloat16 or float32")
        super().start()
        self.optimizer = Optimizer(self.model, self.spec.optimizer)
        self.num_updates = 0

    def _selection(self, rows: Rows) -> Selection:
        raise AssertionError("a role says which tokens its loss counts")

    def _loss(self, rows: Rows, micro: MicroBatch, whole: Normalisers) -> Loss:
        raise AssertionError("a role says what its loss is")

    def _idle_loss(self, micro: MicroBatch) -> Tensor:
        raise AssertionError("a role says how to run its model")

    def tokens(self, rows: Rows, micro: MicroBatch) -> Tokens:
        weights = rows.row.get("session_weight")
        return Tokens(
            rows.response,
            micro.places.cpu(),
            torch.ones_like(micro.targets, dtype=torch.bool),
            torch.bincount(micro.row, minlength=len(micro.rows)),
            None if weights is None else weights[micro.rows.cpu()].to(self.device),
        )

    def train(self, columns: Columns, *, step: int, sizes: Sequence[int]) -> Metrics:
        """Optimizer steps over this rank's mini-batches, which lie one after the other in `sizes` rows each."""
        rows = Rows.of(columns)
        sizes = sizes or [len(rows)]
        assert sum(sizes) == len(rows), f"mini-batches of {list(sizes)} rows do not make {len(rows)}"
        selection = self._selection(rows)
        lr = learning_rate(self.spec.optimizer, step)
        tally = Tally()
        for chosen in list(torch.arange(len(rows)).split(list(sizes))) * self.spec.optimizer.epochs:
            self._mini_batch(rows, chosen, selection, lr, tally)
        self.num_updates += tally.num_trained
        return self._metrics(tally, lr)

    def _mini_batch(self, rows: Rows, chosen: Tensor, selection: Selection, lr: float, tally: Tally) -> None:
        cuts = self.micro_batches(rows, chosen[selection.active[chosen]])
        everyone = self.ranks.gather([*_measures(selection, chosen), len(cuts)])
        tokens, sequences, sessions, trained, _ = (sum(column) for column in zip(*everyone, strict=True))
        if tokens == 0:
            tally.num_all_padding += 1
            return
        if trained == 0:  # every advantage is 0: AdamW would still move, along gradients of steps long past
            tally.num_without_signal += 1
            return
        whole_batch = Normalisers(tokens, sequences, sessions)
        for cut in followed_by_none(cuts, max(int(numbers[-1]) for numbers in everyone)):
            if cut is None:
                self._idle_loss(idle_micro_batch(self.device)).backward()
                continue
            loss = self._loss(rows, self.build(rows, cut, selection.keep), whole_batch)
            (loss.value * self.ranks.size).backward()  # FSDP averages over ranks; shares must add up
            tally.add(loss, trained)
        norm, is_taken = self.optimizer.step(lr)
        tally.num_trained += 1
        tally.num_skipped += not is_taken
        tally.grad_norms.append(norm)

    def _metrics(self, tally: Tally, lr: float) -> Metrics:
        """The same on every rank: shares are added up, the rest is common knowledge."""
        count = max(1, tally.num_trained)
        everyone = self.ranks.gather([tally.totals[name] / count for name in self.report_names])
        metrics = {
            f"{self.prefix}/lr": lr,
            f"{self.prefix}/updates": float(tally.num_trained - tally.num_skipped),
            f"{self.prefix}/skipped_updates": float(tally.num_skipped),
            f"{self.prefix}/updates_without_signal": float(tally.num_without_signal),
        }
        if tally.num_all_padding:
            metrics["padding/all_padding"] = float(tally.num_all_padding)
        if tally.num_trained:
            metrics[f"{self.prefix}/grad_norm"] = sum(tally.grad_norms) / count
            for name, shares in zip(self.report_names, zip(*everyone, strict=True), strict=True):
                metrics[name] = sum(shares)
        return metrics

    def checkpoint_bytes(self) -> int:
        """Bytes of the parameters that learn and of their optimizer state."""
        tensors = [*self.optimizer.parameters.values(), *self.optimizer.state().values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self, folder: str) -> None:
        """All that a bit-exact continuation needs, in safetensors and JSON; loads on any number of ranks."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        is_writer = self.ranks.rank == 0
        parameters = [_entry(name, p) for name, p in self.optimizer.parameters.items()]
        tensorfile.write(path / "model.safetensors" if is_writer else None, parameters)
        moments = [_entry(name, t) for name, t in self.optimizer.state().items()]
        tensorfile.write(path / "optimizer.safetensors" if is_writer else None, moments)
        tensorfile.write(path / f"rng_{self.ranks.rank}.safetensors", _rng_entries(self.device))
        if is_writer:
            state = {"format": 1, "ranks": self.ranks.size, "num_updates": self.num_updates}
            (path / "state.json").write_text(json.dumps(state) + "\n")
        self.ranks.barrier()

    def load(self, folder: str) -> None:
        """The reverse of `save`. On another number of ranks the random states start from the seed."""
        path = Path(folder)
        state = json.loads((path / "state.json").read_text())
        with torch.no_grad(), tensorfile.reading(path / "model.safetensors") as read:
            _check_names(path, set(tensorfile.names(path / "model.safetensors")), set(self.optimizer.parameters))
            for name, parameter in self.optimizer.parameters.items():
                parameter.copy_(like(read(name), parameter))
        self._load_moments(path / "optimizer.safetensors")
        if state["ranks"] == self.ranks.size:
            _restore_rng(path / f"rng_{self.ranks.rank}.safetensors", self.device)
        self.num_updates = state["num_updates"]

    def _load_moments(self, path: Path) -> None:
        moments = {}
        with tensorfile.reading(path) as read:
            for key in tensorfile.names(path):
                moment, name = key.split(".", 1)
                value = read(key)
                # the step count is one number, and stays whole
                moments[key] = value.clone() if moment == "step" else like(value, self.optimizer.parameters[name])
        self.optimizer.restore(moments)


def _measures(selection: Selection, chosen: Tensor) -> list[float]:
    """Tokens, sequences and session weights that count in the loss, and tokens that get a forward."""
    counts = selection.counts[chosen]
    return [
        float(counts.sum()),
        float((counts > 0).sum()),
        float((selection.weights[chosen] * (counts > 0)).sum()),
        float((counts * selection.active[chosen]).sum()),
    ]


def _entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: whole(tensor))


def _rng_entries(device: torch.device) -> list[Entry]:
    entries = [Entry.of("cpu", torch.get_rng_state())]
    if device.type == "cuda":
        entries.append(Entry.of("cuda", torch.cuda.get_rng_state()))
    return entries


def _restore_rng(path: Path, device: torch.device) -> None:
    with tensorfile.reading(path) as read:
        torch.set_rng_state(read("cpu").clone())
        if device.type == "cuda":
            torch.cuda.set_rng_state(read("cuda").clone())


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    if found == expected:
        return
    missing, surplus = sorted(expected - found)[:3], sorted(found - expected)[:3]
    raise CheckpointError(f"{path} is of another model: it lacks {missing} and has {surplus} besides")
