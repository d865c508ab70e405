from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tqppo.errors import OutOfSpace
from tqppo.space import allocate, explained, full_disk

SCRIPT = Path(__file__).with_name("full_disk.py")


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    return os.getuid() == 0 and unshare is not None and not subprocess.call([unshare, "-m", "true"], stderr=-3)


def test_a_file_gets_its_pages_at_once(tmp_path: Path) -> None:
    allocate(tmp_path / "x", 100_000)
    status = (tmp_path / "x").stat()
    assert status.st_size == 100_000
    assert status.st_blocks * 512 >= 100_000


def test_a_file_of_the_same_size_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    allocate(tmp_path / "x", 3)
    assert (tmp_path / "x").read_bytes() == b"abc"
    allocate(tmp_path / "x", 0)
    assert (tmp_path / "x").read_bytes() == b""


def test_a_file_over_the_limit_is_refused_with_the_figures_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OutOfSpace, match=rf"{tmp_path} has no room for 20000 bytes: .*; \d+ bytes are free"):
            allocate(tmp_path / "x", 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "x").stat().st_size == 0


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), explained(tmp_path, 1):
        raise PermissionError(errno.EACCES, "no")


class FromWorker(OSError):
    """Like Ray's wrapper of what a worker raised: it has no errno of its own."""

    def __init__(self, cause: OSError) -> None:
        super().__init__("a traceback")
        self.cause = cause


def test_a_full_disk_is_explained_wherever_the_error_comes_from(tmp_path: Path) -> None:
    named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "x"))
    copied = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/proc/version", None, str(tmp_path / "copy"))
    for error in (named, FromWorker(named), copied):
        assert str(full_disk(error)).startswith(f"{tmp_path} has no room for more: No space left on device;")
    unnamed = full_disk(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    assert str(unnamed).startswith("a file system is full: Disk quota exceeded. Free: ")
    assert "bytes in /dev/shm" in str(unnamed)
    assert full_disk(PermissionError(errno.EACCES, "no")) is None
    assert full_disk(OSError("odd")) is None


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root, for a file system of 1 MiB")
def test_weights_that_do_not_fit_are_an_error_and_not_a_bus_error(tmp_path: Path) -> None:
    full, big = tmp_path / "full", tmp_path / "big"
    full.mkdir()
    big.mkdir()
    command = ["unshare", "-m", sys.executable, str(SCRIPT), str(full), str(big)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all refused" in ended.stdout
