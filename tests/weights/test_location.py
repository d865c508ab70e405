from __future__ import annotations

import glob
import subprocess
import sys
from pathlib import Path

from tqppo.reaper import claim
from tqppo.weights import location

CLAIM = """
import sys
from tqppo.reaper import claim
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
    assert str(made.folder) in glob.glob(location.pattern())
    made.release()
    assert glob.glob(location.pattern()) == []


def test_folders_of_dead_processes_are_removed_and_those_of_live_ones_stay() -> None:
    own = claim(location.new_folder())
    ended = subprocess.run([sys.executable, "-c", CLAIM], capture_output=True, text=True, check=True)
    left = Path(ended.stdout.strip())
    assert left.exists()
    location.remove_abandoned()
    assert not left.exists()
    assert own.folder.exists()
    own.release()
