"""What a rank makes of errors: a full GPU or disk is named, everything else passes as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tqppo.errors import OutOfDeviceMemory, OutOfSpace
from tqppo.workers.compute.worker import Worker
from tqppo.workers.process.rank_process import RankProcess, RankSpec
from tqppo.workers.process.ranks import Ranks, open_store
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


def listening(port: int) -> set[str]:
    """The addresses on which a port of this machine listens."""
    return {
        each.laddr.ip for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port
    }


def test_ranks_of_one_machine_meet_on_loopback_and_a_single_one_listens_nowhere(spec: RoleSpec) -> None:
    before = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}
    alone = RankProcess(RankSpec("actor", Writer, spec, Ranks(0, 1), device="cpu"), None)
    assert alone.open(is_one_node=True) == ("", 0)
    assert {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"} == before
    first = RankProcess(RankSpec("actor", Writer, spec, Ranks(0, 2), device="cpu"), None)
    host, port = first.open(is_one_node=True)
    assert listening(port) == {"127.0.0.1"}
    other = TCPStore(host, port, is_master=False, wait_for_workers=False)
    other.set("a", "b")
    assert other.get("a") == b"b"


def test_a_store_listens_on_the_address_that_it_is_opened_for() -> None:
    store = open_store("127.0.0.2")
    assert listening(store.port) == {"127.0.0.2"}
