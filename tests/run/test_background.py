"""A checkpoint that ranks write while the run goes on: it exists once all parts do, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tqppo.errors import DeadlineExceeded, OutOfSpace, WorkerError
from tqppo.run.background import BackgroundSave
from tqppo.run.checkpoint import CheckpointStore, open_checkpoint
from tqppo.space import Digest

DATA = b"a rank's rows"


class Parts:
    """Two ranks, of which the second has written after a number of looks."""

    def __init__(self, looks: int = 0, fails: Exception | None = None) -> None:
        self.looks, self.fails, self.folder = looks, fails, Path()

    def begin(self, folder: Path) -> Parts:
        self.folder = folder
        (folder / "rank_0").write_bytes(DATA)
        return self

    def written(self, wait_s: float) -> dict[str, Digest] | None:
        if self.looks:
            self.looks -= 1
            return None
        if self.fails:
            raise self.fails
        (self.folder / "rank_1").write_bytes(DATA)
        return {name: Digest.of_bytes(DATA) for name in ("rank_0", "rank_1")}


def saving(tmp_path: Path, parts: Parts, **options: float) -> BackgroundSave:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    return BackgroundSave(store, parts.begin, **options)  # type: ignore[arg-type]


def test_it_is_a_checkpoint_once_every_part_is_written(tmp_path: Path) -> None:
    save = saving(tmp_path, Parts(looks=2))
    assert save.look(), "nothing is under way"
    save.begin(4, {"cursor": 3}, num_bytes=0)
    for _ in range(2):
        assert not save.look()
        assert save.step == 4
        assert save.store.steps() == []
        assert not (save.store.folder / "latest").exists()
    assert save.look()
    assert save.step == 0
    assert open_checkpoint(save.store.folder / "latest").driver_state() == {"cursor": 3}


def test_a_wait_says_what_it_waits_for_and_ends_at_its_deadline(tmp_path: Path) -> None:
    said: list[str] = []

    @contextmanager
    def announce(what: str) -> Iterator[None]:
        said.append(what)
        yield

    save = saving(tmp_path, Parts(looks=3))
    save.announce = announce
    save.begin(4, {}, num_bytes=0)
    save.finish()
    assert said == ["writing the checkpoint of step 4"]
    assert save.store.steps() == [4]
    save = saving(tmp_path, Parts(looks=10**9), timeout_s=0.01)
    save.begin(5, {}, num_bytes=0)
    with pytest.raises(DeadlineExceeded, match=r"the checkpoint of step 5 was not written within 0\.01 s"):
        save.finish()
    assert save.store.steps() == [4]
    assert save.look(), "it was given up"


@pytest.mark.parametrize("error", [OutOfSpace("rank 1 has no room"), WorkerError("rank 1 is gone")])
def test_a_part_that_fails_leaves_no_draft_and_the_next_save_is_a_new_one(tmp_path: Path, error: Exception) -> None:
    parts = Parts(looks=1, fails=error)
    save = saving(tmp_path, parts)
    save.begin(4, {}, num_bytes=0)
    assert not save.look()
    with pytest.raises(type(error), match="rank 1"):
        save.look()
    assert list(save.store.folder.iterdir()) == []
    assert save.look(), "nothing is left to wait for"
    parts.fails = None
    save.begin(6, {}, num_bytes=0)
    save.finish()
    assert save.store.steps() == [6]


def test_a_save_for_which_there_is_no_room_is_not_begun(tmp_path: Path) -> None:
    save = saving(tmp_path, Parts())
    with pytest.raises(OutOfSpace):
        save.begin(4, {}, num_bytes=2**60)
    assert save.step == 0
    assert list(save.store.folder.iterdir()) == []
