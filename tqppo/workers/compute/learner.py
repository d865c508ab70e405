"""The training loop of actor and critic: mini-batches, micro-batches, exact normalisers, optimizer, state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tqppo.algorithms.aggregate import Normalisers
from tqppo.errors import CheckpointError, PreflightError
from tqppo.protocols import Metrics
from tqppo.space import Digest
from tqppo.weights import file as tensorfile
from tqppo.weights import parts
from tqppo.weights.file import Entry
from tqppo.weights.parts import Parts, TensorFile
from tqppo.workers.compute.microbatch import FlatRows, MicroBatch
from tqppo.workers.compute.optimizer import Optimizer, learning_rate
from tqppo.workers.compute.saving import BackgroundWriter, LearnerPart, SavedPart
from tqppo.workers.compute.tally import Loss, ReportNames, Tally
from tqppo.workers.compute.worker import Worker, followed_by_none, idle_micro_batch
from tqppo.workers.process.bridge import Columns


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens and rows of an update count, computed once per update."""

    keep: Tensor  # [ΣR] bool: tokens that get a forward
    counts: tuple[Tensor, ...]  # [B] for each term of the loss: its tokens in each row; the first has all of `keep`
    active: Tensor  # [B] bool: rows that can have a gradient; the others need no forward
    weights: Tensor  # [B] session weights


@dataclass(frozen=True, slots=True)
class Tokens:
    """The counted tokens of one micro-batch: N of them, in `lengths` [b] per row."""

    rows: FlatRows
    row: Tensor  # [N] row of each token in `rows`
    places: Tensor  # [N] in response columns
    mask: Tensor  # [N], all true unless a term of the loss counts fewer
    lengths: Tensor
    session_weights: Tensor | None  # [b]

    def column(self, name: str) -> Tensor:
        """A response column's values for these tokens: [N, …]."""
        return self.rows.response[name][self.places].to(self.mask.device)

    def sequence_column(self, name: str) -> Tensor:
        """A sequence column's values at the positions that these tokens follow: [N, …]."""
        return self.rows.sequence[name][self.rows.positions(self.row, self.places)].to(self.mask.device)

    def row_column(self, name: str) -> Tensor:
        """The value of each token's row: [N, …]."""
        return self.rows.row[name][self.row].to(self.mask.device)


class Learner(Worker):
    """A worker whose model learns. Roles define `_loss`, `_idle_loss`, `_selection` and `report`."""

    prefix = ""  # first part of the metrics' names: "actor", "critic"

    @property
    def report(self) -> ReportNames:
        """Names of the metrics that `_loss` reports."""
        raise NotImplementedError

    def start(self) -> None:
        if self.dtype == torch.float16:
            raise PreflightError("model.dtype float16 cannot train: gradients underflow; use bfloat16 or float32")
        self.writer = BackgroundWriter()
        super().start()
        self.optimizer = Optimizer(self.model, self.spec.optimizer)
        self.num_updates = 0

    def device_tensors(self) -> Iterator[Tensor]:
        yield from super().device_tensors()
        yield from self.optimizer.state().values()

    def _selection(self, rows: FlatRows) -> Selection:
        """Which tokens and rows the role's loss counts."""
        raise NotImplementedError

    def _loss(self, rows: FlatRows, micro: MicroBatch, whole: Sequence[Normalisers]) -> Loss:
        """The role's loss of one micro-batch, as a share of the mini-batch that `whole` describes, for each term."""
        raise NotImplementedError

    def _idle_loss(self, micro: MicroBatch) -> Tensor:
        """A loss of 0 that runs the role's model, for a rank without rows."""
        raise NotImplementedError

    def tokens(self, rows: FlatRows, micro: MicroBatch) -> Tokens:
        weights = rows.row.get("session_weight")
        return Tokens(
            rows,
            micro.rows.cpu()[micro.row.cpu()],
            micro.places.cpu(),
            torch.ones_like(micro.targets, dtype=torch.bool),
            torch.bincount(micro.row, minlength=len(micro.rows)),
            None if weights is None else weights[micro.rows.cpu()].to(self.device),
        )

    def train(self, columns: Columns, *, step: int, sizes: Sequence[int]) -> Metrics:
        """Take one optimizer step per mini-batch and epoch. Mini-batches are adjacent, of `sizes` rows each."""
        rows = FlatRows.of(columns)
        sizes = sizes or [len(rows)]
        assert sum(sizes) == len(rows), f"mini-batches of {list(sizes)} rows do not make {len(rows)}"
        selection = self._selection(rows)
        lr = learning_rate(self.spec.optimizer, step)
        tally = Tally()
        for chosen in list(torch.split(torch.arange(len(rows)), list(sizes))) * self.spec.optimizer.epochs:
            self._mini_batch(rows, chosen, selection, lr, tally)
        self.num_updates += tally.num_trained
        return self._metrics(tally, lr)

    def _mini_batch(self, rows: FlatRows, chosen: Tensor, selection: Selection, lr: float, tally: Tally) -> None:
        cuts = self.micro_batches(rows, chosen[selection.active[chosen]])
        by_rank = self.ranks.gather([*_measures(selection, chosen), len(cuts)])
        *totals, trained, _ = (sum(column) for column in zip(*by_rank, strict=True))
        whole_batch = [Normalisers(*totals[i : i + 3]) for i in range(0, len(totals), 3)]
        if whole_batch[0].tokens == 0:
            tally.num_all_padding += 1
            return
        if trained == 0:  # every advantage is 0; AdamW would still move the weights, along its moments
            tally.num_without_signal += 1
            return
        for cut in followed_by_none(cuts, max(int(numbers[-1]) for numbers in by_rank)):
            if cut is None:
                torch.autograd.backward(self._idle_loss(idle_micro_batch(self.device)))
                continue
            loss = self._loss(rows, self.build(rows, cut, selection.keep), whole_batch)
            torch.autograd.backward(loss.value * self.ranks.size)  # FSDP averages over ranks; shares must add up
            tally.add(loss, trained)
        norm, is_taken = self.optimizer.step(lr)
        tally.num_trained += 1
        tally.num_skipped += not is_taken
        tally.grad_norms.append(norm)

    def _metrics(self, tally: Tally, lr: float) -> Metrics:
        """The metrics of the whole update, the same on every rank."""
        joined = tally.joined(self.report, self.ranks.gather)
        metrics = {
            f"{self.prefix}/lr": lr,
            f"{self.prefix}/updates": float(tally.num_trained - tally.num_skipped),
            f"{self.prefix}/skipped_updates": float(tally.num_skipped),
            f"{self.prefix}/updates_without_signal": float(tally.num_without_signal),
        }
        if tally.num_all_padding:
            metrics["padding/all_padding"] = float(tally.num_all_padding)
        if tally.num_trained:
            metrics[f"{self.prefix}/grad_norm"] = sum(tally.grad_norms) / tally.num_trained
            metrics |= joined
        return metrics

    def checkpoint_bytes(self) -> int:
        """Bytes of the parameters that learn and of their optimizer state."""
        tensors = [*self.optimizer.parameters.values(), *self.optimizer.state().values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self, folder: str) -> dict[str, Digest]:
        """Save this rank's part of all that a bit-exact continuation needs; any number of ranks can load the parts.

        Returns the files that this rank has written, hashed as they were written. No rank waits for another.
        """
        return self._part().write(folder)

    def try_save(self, folder: str) -> SavedPart:
        """Like `save`, but a full disk is part of the result: an error would end this worker, and a run without this
        checkpoint may go on."""
        return self._part().try_write(folder)

    def begin_save(self, folder: str) -> None:
        """Copy what `save` would write to host memory, and write it while this rank goes on; see `saved`."""
        self.writer.begin(self._part().copied(), folder)

    def saved(self, wait_s: float) -> SavedPart | None:
        """What `begin_save` has written; None if it is still writing after `wait_s`."""
        return self.writer.result(wait_s)

    def close(self) -> None:
        self.writer.close()
        super().close()

    def _part(self) -> LearnerPart:
        rank, size = self.ranks.rank, self.ranks.size
        files = [
            parts.part_of("model", self.optimizer.parameters, rank=rank, size=size),
            parts.part_of("optimizer", self.optimizer.state(), rank=rank, size=size),
            TensorFile(f"rng_{rank}.safetensors", _rng_entries(self.device)),
        ]
        state = json.dumps({"format": 1, "ranks": size, "num_updates": self.num_updates}) + "\n"
        return LearnerPart(files, {"state.json": state.encode()} if rank == 0 else {})

    def load(self, folder: str) -> None:
        """Load what all ranks saved, each rank its own rows. On another number of ranks random states start over."""
        path = Path(folder)
        state = json.loads((path / "state.json").read_text())
        model = Parts.open(path, "model")
        _check_names(path, set(model.names), set(self.optimizer.parameters))
        with torch.no_grad():
            for name, parameter in self.optimizer.parameters.items():
                parameter.copy_(model.like(name, parameter))
        self._load_moments(Parts.open(path, "optimizer"))
        if state["ranks"] == self.ranks.size:
            _restore_rng(path / f"rng_{self.ranks.rank}.safetensors", self.device)
        self.num_updates = state["num_updates"]

    def _load_moments(self, saved: Parts) -> None:
        moments = {}
        for key in saved.names:
            moment, name = key.split(".", 1)
            # the step count is a single number and is not sharded
            is_number = moment == "step"
            moments[key] = saved.whole(key) if is_number else saved.like(key, self.optimizer.parameters[name].detach())
        self.optimizer.restore(moments)


def _measures(selection: Selection, chosen: Tensor) -> list[float]:
    """Totals of tokens, sequences and session weights in each term of the loss, and of the tokens in a forward."""
    totals = []
    for counts in (each[chosen] for each in selection.counts):
        weights = selection.weights[chosen] * (counts > 0)
        totals += [float(counts.sum()), float((counts > 0).sum()), float(weights.sum())]
    trained = selection.counts[0][chosen] * selection.active[chosen]
    return [*totals, float(trained.sum())]


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
    raise CheckpointError(f"{path} belongs to another model: it lacks {missing} and has {surplus} in addition")
