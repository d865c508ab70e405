"""A rank's part of a checkpoint: written at once, or from a copy while the rank goes on. Learners say what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tqppo.space import Digest
from tqppo.weights import file as tensorfile
from tqppo.weights.parts import TensorFile


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a rank has saved: its files, or why they do not fit on the disk."""

    files: dict[str, Digest]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LearnerPart:
    """The files that one rank writes: of tensors, and small ones by their names."""

    tensors: Sequence[TensorFile]
    small: Mapping[str, bytes] = field(default_factory=dict)

    def copied(self) -> LearnerPart:
        return replace(self, tensors=[each.copied() for each in self.tensors])

    def write(self, folder: str) -> dict[str, Digest]:
        """Returns the digest of each file, hashed as it was written."""
        path, written = Path(folder), dict[str, Digest]()
        path.mkdir(parents=True, exist_ok=True)
        for each in self.tensors:
            written |= each.write(path)
        for name, data in self.small.items():
            tensorfile.write_beside(path / name, data)
            written[name] = Digest.of_bytes(data)
        return written

    def try_write(self, folder: str) -> SavedPart:
        """Like `write`, but a full disk is part of the result."""
        with tensorfile.deferring() as problems:
            files = self.write(folder)
        return SavedPart({}, str(problems[0])) if problems else SavedPart(files)


class BackgroundWriter:
    """Writes the part of one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tqppo-save")
        self._part: Future[SavedPart] | None = None

    def begin(self, part: LearnerPart, folder: str) -> None:
        assert self._part is None or self._part.done(), "the part before is still being written"
        self._part = self._thread.submit(part.try_write, folder)

    def result(self, wait_s: float) -> SavedPart | None:
        """What was written since `begin`; None if that is not all after `wait_s`. Raises what the write has raised."""
        assert self._part is not None, "nothing was begun"
        done, _ = futures.wait([self._part], wait_s)
        return self._part.result() if done else None

    def close(self) -> None:
        """Wait for the part under way."""
        self._thread.shutdown()
