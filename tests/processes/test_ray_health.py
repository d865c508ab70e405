from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tqppo.errors import ClusterLost
from tqppo.processes import ray_health
from tqppo.processes.ray_health import LocalService, RemoteService, services_of, watched


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    ray_health.forget()


@pytest.fixture
def service() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "600"])
    yield started
    started.kill()
    started.wait()


def never(message: str) -> None:
    raise AssertionError(message)


def test_the_death_of_a_service_is_an_error_of_every_wait(service: subprocess.Popen[bytes]) -> None:
    lost = threading.Event()
    with watched([LocalService("the raylet", service.pid)], never, on_lost=lost.set):
        ray_health.check()
        service.kill()
        service.wait()
        assert lost.wait(5)
        with pytest.raises(ClusterLost, match=rf"Ray is lost: the raylet \(process {service.pid}\) has died"):
            ray_health.check()
    assert ray_health.lost()
    ray_health.forget()
    assert not ray_health.lost()


def test_a_death_is_seen_at_once_where_something_else_has_failed(service: subprocess.Popen[bytes]) -> None:
    with watched([LocalService("the raylet", service.pid)], never):
        service.kill()
        service.wait()
        with pytest.raises(ClusterLost):
            ray_health.check(now=True)


def test_whatever_fails_once_a_service_is_gone_fails_because_of_it(service: subprocess.Popen[bytes]) -> None:
    def fail_without_the_service() -> None:
        with watched([LocalService("the raylet", service.pid)], never):
            service.kill()
            service.wait()
            raise ValueError("rows are lost")

    with pytest.raises(ClusterLost, match="the raylet"):
        fail_without_the_service()
    with pytest.raises(ValueError, match="another reason"), watched([], never):
        raise ValueError("another reason")


def test_a_process_that_does_not_leave_after_the_loss_is_ended(
    service: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_health, "UNWIND_S", 0.2)
    said: list[str] = []
    with watched([LocalService("the raylet", service.pid)], said.append):
        service.kill()
        service.wait()
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "the raylet" in said[0]


def test_a_service_of_another_machine_is_gone_after_several_attempts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        remote = RemoteService("its control service", "127.0.0.1", server.getsockname()[1])
        assert remote.problem() == ""
    assert remote.problem() == ""
    assert remote.problem() == ""
    assert "does not answer" in remote.problem()


def test_services_are_found_by_their_commands(service: subprocess.Popen[bytes]) -> None:
    while Path(f"/proc/{service.pid}/comm").read_text() != "sleep\n":  # the kernel sets it a moment after the start
        time.sleep(0.01)
    (found,) = services_of({"sleep": "the sleeper"}, [service.pid, 1, 2**22 - 1])
    assert isinstance(found, LocalService)
    assert (found.name, found.pid) == ("the sleeper", service.pid)
