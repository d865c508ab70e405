"""Ray for one run, in a process of its own: a private one leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tqppo.run.cluster import PRIVATE_PREFIX

PROGRAM = """
import json, os, sys, tempfile
from pathlib import Path
import psutil
from tqppo.run.cluster import PRIVATE_PREFIX, ray_cluster

with ray_cluster("", num_cpus=1, object_store_bytes=0, logs=Path(sys.argv[1])):
    import ray
    assert ray.is_initialized()
    mine = Path(tempfile.gettempdir()).glob(f"{PRIVATE_PREFIX}{os.getpid()}-*")
    started = [each.pid for each in psutil.Process().children(recursive=True)]
    print(json.dumps({"folders": [str(each) for each in mine], "pids": started}), flush=True)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_private_ray_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [Path(each).name.startswith(PRIVATE_PREFIX) for each in said["folders"]] == [True]
    assert not Path(said["folders"][0]).exists()
    left = [psutil.Process(pid) for pid in said["pids"] if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=30)[1]
