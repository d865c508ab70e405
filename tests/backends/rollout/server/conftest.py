"""Nothing is left in shared memory by the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

OURS = ("sglang", "sgl_shm", "vllm", "psm_")  # names that servers give; others on this machine have theirs


@pytest.fixture(scope="module", autouse=True)
def shared_memory_is_left_as_it_was() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(OURS)]
    assert not left, f"left in shared memory: {left}"
