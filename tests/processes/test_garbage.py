from __future__ import annotations

import gc
import weakref

from tqppo.processes.garbage import spare_what_started, spared_while_importing


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


def test_nothing_is_looked_at_while_modules_are_imported() -> None:
    with spared_while_importing():
        assert not gc.isenabled()
        with spared_while_importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
