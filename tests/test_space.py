"""Files are written whole or not at all, and a full file system is an error with figures."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from disks import files_of_at_most

from tqppo.errors import OutOfSpace
from tqppo.space import allocate, append_line, exhausted, explained, require, write_whole


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
    with (
        files_of_at_most(10_000),
        pytest.raises(OutOfSpace, match=rf"{tmp_path} has no room for 20000 bytes: .*; \d+ bytes are free"),
    ):
        allocate(tmp_path / "x", 20_000)
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
        assert str(exhausted(error)).startswith(f"{tmp_path} has no room for more: No space left on device;")
    unnamed = exhausted(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    assert str(unnamed).startswith("a file system is full: Disk quota exceeded. Free: ")
    assert "bytes in /dev/shm" in str(unnamed)
    assert exhausted(PermissionError(errno.EACCES, "no")) is None
    assert exhausted(OSError("odd")) is None


def test_used_up_descriptors_are_explained_with_the_limit() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/some/file")
    for each in (error, FromWorker(error)):
        assert str(exhausted(each)) == (
            f"too many open files: the limit of this process, {limit}, is reached. Raise it: ulimit -n"
        )
    assert "of this machine" in str(exhausted(OSError(errno.ENFILE, os.strerror(errno.ENFILE))))


def test_a_folder_that_is_not_there_yet_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    said = r"runs/mine has no room for more: .*; \d+ bytes are free there"
    with pytest.raises(OutOfSpace, match=said), explained(tmp_path / "runs" / "mine", 0):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_room_is_asked_for_before_a_write(tmp_path: Path) -> None:
    require(tmp_path, 1)
    with pytest.raises(OutOfSpace, match=rf"{tmp_path} has no room for {2**60} bytes: No space left"):
        require(tmp_path, 2**60)


# -- whole files -------------------------------------------------------------------------------------------------------


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize(("failure", "error"), [(interrupted, KeyboardInterrupt), (no_space, OutOfSpace)])
def test_a_file_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    failure: Callable[..., None],
    error: type[BaseException],
) -> None:
    write_whole(tmp_path / "x", b"before")
    monkeypatch.setattr(os, place, failure)
    with pytest.raises(error):
        write_whole(tmp_path / "x", b"after")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"before")]


# -- lines -------------------------------------------------------------------------------------------------------------


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    append_line(tmp_path / "x", b"first\n")
    with files_of_at_most(10), pytest.raises(OutOfSpace, match="has no room for 7 bytes"):
        append_line(tmp_path / "x", b"second\n")
    assert (tmp_path / "x").read_bytes() == b"first\n"


def test_a_short_write_is_completed(tmp_path: Path) -> None:
    """A pipe is full halfway through the line, and then a signal ends the system call with what it has written."""
    path, line, taken = tmp_path / "x", b"x" * 200_000 + b"\n", bytearray()
    os.mkfifo(path)

    def reader() -> None:
        with path.open("rb", buffering=0) as pipe:
            while waiting(pipe.fileno()) < 65_536:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.05)
            while piece := pipe.read(10_000):
                taken.extend(piece)

    interruptions: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interruptions.append(number)

    before = signal.signal(signal.SIGUSR1, note)
    thread = threading.Thread(target=reader)
    thread.start()
    try:
        append_line(path, line)
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.join(timeout=20)
    assert interruptions == [signal.SIGUSR1]
    assert bytes(taken) == line


def waiting(pipe: int) -> int:
    """Bytes in a pipe that were not read yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, struct.pack("i", 0)))
    return int(count)
