"""Workers of Ray that are forked from a process with their imports: as if Ray had started them, only sooner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tqppo.processes import fork_server as server_module
from tqppo.processes import forked_worker
from tqppo.processes.fork_server import fork_server, has_server
from tqppo.processes.forked_worker import SERVER, ask, ray_script

REPORT = """
import json, os, signal, sys, threading
import numpy as np
print(json.dumps({
    "arguments": sys.argv[1:], "variable": os.environ.get("TOLD"), "folder": os.getcwd(),
    "group": os.getpgid(0) == os.getpid(), "blocks": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "beside": sys.path[0], "imported": "colorsys" in sys.modules, "ray": "ray" in sys.modules,
    "threads": threading.active_count(), "random": np.random.random(), "parent": os.getppid(),
    "threads of torch": os.environ.get("OMP_NUM_THREADS"),
}))
"""
START = """
import sys
from tqppo.processes import forked_worker
del sys.argv[0]
forked_worker.ray_script = lambda: sys.argv[0]
forked_worker.main()
"""


@pytest.fixture(autouse=True)
def _without_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other files, in the same process, may have started one."""
    monkeypatch.delenv(SERVER, raising=False)


def started(folder: Path, *arguments: str, **environment: str) -> dict[str, object]:
    """What a worker reports that a raylet would start with these arguments."""
    script = folder / "script.py"
    script.write_text(REPORT)
    before = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", START, str(script), *arguments],
        cwd=folder,
        env=before | environment,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: (os.setpgid(0, 0), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])),
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_forked_worker_is_as_if_ray_had_started_it(tmp_path: Path) -> None:
    with fork_server(["colorsys"]):
        forked = started(tmp_path, "--node-id=3", "two words", TOLD="yes")
        other = started(tmp_path)
    alone = started(tmp_path, "--node-id=3", "two words", TOLD="yes")
    assert (forked.pop("imported"), alone.pop("imported")) == (True, False)
    assert len({run.pop("random") for run in (forked, other, alone)}) == 3
    assert forked.pop("parent") == other["parent"]
    assert alone.pop("parent") == os.getpid()
    assert forked == alone
    assert forked["arguments"] == ["--node-id=3", "two words"]
    assert forked["group"]
    assert not forked["ray"]


def test_without_a_server_or_with_a_dead_one_nothing_is_asked() -> None:
    assert not ask("", "script.py", [])
    with fork_server(["colorsys"]):
        address = os.environ[SERVER]
    assert SERVER not in os.environ
    assert not ask(address, "script.py", [])


def test_a_process_has_one_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER, "tqppo-fork-1-of-another-process")
    assert not has_server()
    with fork_server(["colorsys"]):
        assert has_server()
        address = os.environ[SERVER]
        with fork_server(["colorsys"]):
            assert os.environ[SERVER] == address
        assert os.environ[SERVER] == address
    assert os.environ[SERVER] == "tqppo-fork-1-of-another-process"


def test_a_server_that_stands_still_is_given_up_and_forks_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    with fork_server(["colorsys"]):
        address = os.environ[SERVER]
        assert ask(address, str(script), [])
        servers = [each for each in psutil.Process().children() if "fork_server" in " ".join(each.cmdline())]
        server = max(servers, key=psutil.Process.create_time)
        server.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(forked_worker, "ANSWER_TIMEOUT_S", 0.2)
            assert not ask(address, str(script), [])
        server.resume()
        assert ask(address, str(script), [])  # answered in turn, after the one that was given up
        deadline = time.monotonic() + 30
        while not (tmp_path / "ran").exists() or (tmp_path / "ran").read_text() != "xx":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        assert (tmp_path / "ran").read_text() == "xx"


def test_the_script_of_ray_is_found_without_ray() -> None:
    assert Path(ray_script()).is_file()


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.modules['ray'] = sys\n",
        "import threading, time\nthreading.Thread(target=time.sleep, args=[9]).start()\n",
    ],
    ids=["ray", "threads"],
)
def test_a_server_that_cannot_be_forked_forks_nothing(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_backend.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with fork_server(["their_backend"]):
        assert started(tmp_path)["parent"] == os.getpid()


def test_strangers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert server_module._is_own(ours)
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert not server_module._is_own(ours)


OWNER = """
import subprocess, sys, time
from tqppo.processes.fork_server import fork_server
with fork_server(["colorsys"]):
    worker = subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
    print("up", flush=True)
    time.sleep(600)
"""
SLEEP = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), os.getppid(), child.pid, flush=True)
time.sleep(600)
"""


def test_server_and_workers_end_with_their_owner_even_if_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(SLEEP)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, START, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        lines = [owner.stdout.readline(), owner.stdout.readline()]
    (pids,) = ([int(each) for each in line.split()] for line in lines if line != "up\n")
    assert len(pids) == 3
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived the owner of its server"
        time.sleep(0.02)
