"""The exported model of a run: replaced as a whole, and never taken for that of another step. No torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tqppo import space
from tqppo.untrusted import read_file

MAX_NOTE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A Hugging Face folder, and the note of its step beside it."""

    path: Path

    @property
    def step(self) -> int | None:
        """The step whose weights are exported; None if there are none, or it is not known of which step."""
        try:
            step = int(read_file(self._note, MAX_NOTE_BYTES))
        except (OSError, ValueError):
            return None
        return step if self.path.is_dir() else None

    @property
    def partial(self) -> Path:
        """Where an export is made, before `replace`."""
        return self.path.with_name(f".partial-{self.path.name}")

    @property
    def _before(self) -> Path:
        return self.path.with_name(f".before-{self.path.name}")

    @property
    def _note(self) -> Path:
        return self.path.with_name(".step")

    def replace(self, step: int) -> None:
        """Put the export that was made in place of the one before. Its step is noted last."""
        space.sync_tree(self.partial)
        self._note.unlink(missing_ok=True)
        shutil.rmtree(self._before, ignore_errors=True)
        if self.path.exists():
            self.path.rename(self._before)
        self.partial.rename(self.path)
        space.write_whole(self._note, str(step).encode())
        shutil.rmtree(self._before, ignore_errors=True)

    def remove_partial(self) -> None:
        """Remove what an export that was killed or failed left behind; the one before it is in its place again."""
        if self._before.is_dir() and not self.path.exists():
            self._before.rename(self.path)
        for path in (self._before, self.partial):
            shutil.rmtree(path, ignore_errors=True)
