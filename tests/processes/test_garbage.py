from __future__ import annotations

import gc
import weakref

from tqppo.processes.garbage import spare_what_started


class Node:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_skips_what_exists_and_finds_what_comes_later() -> None:
    try:
        spare_what_started()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count()
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
