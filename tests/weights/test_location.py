from __future__ import annotations

import fnmatch
import glob
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tqppo.errors import PreflightError
from tqppo.processes.reaper import claim
from tqppo.weights import location

CLAIM = """
import sys
from tqppo.processes.reaper import claim
from tqppo.weights import location
made = claim(location.new_folder())
(made.folder / "model.safetensors").write_bytes(b"weights")
print(made.folder)
"""


def test_a_new_folder_has_its_own_name_and_does_not_exist() -> None:
    first, second = location.new_folder(), location.new_folder()
    assert first != second
    assert not first.exists()
    assert first.parent == location.parent()


def test_the_pattern_finds_folders_of_this_process() -> None:
    made = claim(location.new_folder())
    assert str(made.folder) in glob.glob(location.patterns()[0])
    made.release()
    assert glob.glob(location.patterns()[0]) == []


def test_folders_of_dead_processes_are_removed_and_those_of_live_ones_stay() -> None:
    own = claim(location.new_folder())
    ended = subprocess.run([sys.executable, "-c", CLAIM], capture_output=True, text=True, check=True)
    left = Path(ended.stdout.strip())
    assert left.exists()
    location.remove_abandoned()
    assert not left.exists()
    assert own.folder.exists()
    own.release()


def test_weights_go_where_there_is_room_or_the_figures_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {location.parents()[0]: 100, location.parents()[1]: 10_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    assert location.parent(50) == location.parents()[0]
    assert location.new_folder(51).parent == location.parents()[1]  # two versions of it
    with pytest.raises(PreflightError, match=r"2 versions of 512 KiB.*(.|\n)*--shm-size"):
        location.parent(2**19)


SAME_PID = """
import os
os.getpid = lambda: 7
from tqppo.weights import location
print(location.new_folder(), location.patterns()[0])
"""


def test_the_pattern_does_not_find_folders_of_another_process_with_the_same_id() -> None:
    """Containers that share /dev/shm each have a process 7; the death of one must not cost the other its weights."""
    said = [subprocess.run([sys.executable, "-c", SAME_PID], capture_output=True, text=True, check=True) for _ in "ab"]
    (folder, own), (_, other) = (each.stdout.split() for each in said)
    assert fnmatch.fnmatch(folder, own)
    assert not fnmatch.fnmatch(folder, other)
