"""A private Ray starts the processes that a run needs and no others, and its workers from the run's fork server."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tqppo.devices.seats import NO_CPU
from tqppo.processes.fork_server import fork_server
from tqppo.processes.hosting import Hosting
from tqppo.processes.lifeline import descendants
from tqppo.run.cluster import ray_cluster
from tqppo.run.lean_ray import lean_ray

LOOPBACK = {"127.0.0.1"}
UNUSED = ("dashboard/dashboard.py", "monitor.py", "log_monitor.py")  # Ray's own, which nobody here asks anything


class Place:
    """Says where it is."""

    def pids(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()

    def has_imported(self, name: str) -> bool:
        return name in sys.modules


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def listening(pid: int) -> list[str]:
    """The addresses at which a process waits for connections from anywhere."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).net_connections("inet")
        return [each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN]
    return []


@pytest.mark.ray
def test_a_private_ray_forks_its_workers_and_starts_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # Ray's sockets need a short path
    with (
        fork_server(["colorsys"]),
        ray_cluster("", num_cpus=1, object_store_bytes=0, logs=tmp_path) as launcher,
    ):
        (server,) = (pid for pid in descendants(os.getpid()) if "fork_server" in command(pid))
        place = launcher.launch(Hosting(NO_CPU), Place)
        pid, parent = place.call(Place.pids).result()
        assert parent == server
        assert command(pid).startswith("ray::Place")
        assert place.call(Place.has_imported, "colorsys").result()
        assert {address for each in (os.getpid(), *descendants(os.getpid())) for address in listening(each)} == LOOPBACK
        running = [command(each) for each in descendants(os.getpid())]
        assert [each for each in running if any(name in each for name in UNUSED)] == []
        os.kill(server, signal.SIGKILL)
        alone = launcher.launch(Hosting(NO_CPU), Place)
        assert alone.call(Place.pids).result()[1] != server
        assert place.call(Place.pids).result()[0] == pid  # who was forked lives on
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ray_is_itself_again_afterwards() -> None:
    from ray._private import node, parameter, utils

    before = parameter.RayParams, node.Node.start_api_server, utils.get_dashboard_dependency_error
    with lean_ray():
        assert parameter.RayParams is not before[0]
    assert (parameter.RayParams, node.Node.start_api_server, utils.get_dashboard_dependency_error) == before
