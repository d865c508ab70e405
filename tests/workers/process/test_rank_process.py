"""What a rank makes of errors: a full GPU or disk is named, everything else passes as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tqppo.errors import OutOfDeviceMemory, OutOfSpace
from tqppo.workers.compute.worker import Worker
from tqppo.workers.process.rank_process import RankProcess, RankSpec
from tqppo.workers.process.ranks import Ranks
from tqppo.workers.specs import RoleSpec


class Writer(Worker):
    """Fails as a worker does that writes to a full place."""

    def fails(self, error: Exception) -> None:
        raise error


def test_a_full_gpu_or_disk_is_named_and_other_errors_pass(spec: RoleSpec, tmp_path: Path) -> None:
    rank = RankProcess(RankSpec("actor", Writer, spec, Ranks(0, 1), device="cpu"), None)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "draft"))
    with pytest.raises(OutOfSpace, match=f"{tmp_path} has no room for more: No space left on device; "):
        rank.call(Writer.fails, full)
    with pytest.raises(OutOfDeviceMemory, match="the GPU of actor-0, in fails"):
        rank.call(Writer.fails, torch.OutOfMemoryError("tried to allocate 2 GiB"))
    with pytest.raises(PermissionError):
        rank.call(Writer.fails, PermissionError(errno.EACCES, "no"))
