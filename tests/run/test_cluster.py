"""Ray for one run: there while the run is, and gone afterwards, also when the run is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
from disks import files_of_at_most

from tqppo.errors import PreflightError
from tqppo.run.cluster import PRIVATE_PREFIX, TOO_SLOW, _keep_logs, _time_to_start, ray_cluster, start_patiently
from tqppo.run.ray_token import FILE

START = """
import sys, tempfile, time
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from tqppo.run.cluster import ray_cluster
with ray_cluster("", num_cpus=1, object_store_bytes=0, logs=Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def started(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "up\n"
    return process


def sessions(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(f"{PRIVATE_PREFIX}*")]


@pytest.mark.slow
def test_the_session_folder_is_gone_after_the_run_and_after_a_kill() -> None:
    folder = Path("/tmp") / f"tq{time.time_ns() % 10**6}"  # Ray's sockets need a short path
    folder.mkdir()
    try:
        process = started(folder, 0.1)
        assert process.wait(timeout=120) == 0
        assert sessions(folder) == []
        process = started(folder, 600)
        assert len(sessions(folder)) == 1
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while sessions(folder):
            assert time.monotonic() < deadline, "the session's folder outlived the run"
            time.sleep(0.1)
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=False)


STRANGER = """
import sys, ray
from ray.exceptions import AuthenticationError
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except (AuthenticationError, ConnectionError, RuntimeError) as error:
    print("refused")
else:
    print("let in")
"""


def a_process_that_connects(address: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, address],
        env=inherited | {"HOME": "/nonexistent"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.ray
def test_a_private_ray_lets_nobody_in_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with ray_cluster("", num_cpus=1, object_store_bytes=0, logs=Path("/tmp")):
        assert ray.get(ray.remote(lambda: 3).remote()) == 3
    with ray_cluster("", num_cpus=1, object_store_bytes=0, logs=Path("/tmp")):
        (token,) = Path("/tmp").glob(f"{PRIVATE_PREFIX}{os.getpid()}-*/{FILE}")  # another than that of the first
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert ray.get(ray.remote(lambda: 4).remote()) == 4
        address = ray.get_runtime_context().gcs_address
        assert a_process_that_connects(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64) == "refused"
        assert a_process_that_connects(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)) == "let in"
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(PreflightError, match=r"cluster\.address = '127\.0\.0\.1:1'"),
        ray_cluster("127.0.0.1:1", num_cpus=1, object_store_bytes=0, logs=tmp_path),
    ):
        pass


def test_what_workers_printed_is_kept_in_the_run_s_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session, logs = tmp_path / "tqppo-ray-1" / "session_2026-01-01", tmp_path / "logs"
    (session / "logs").mkdir(parents=True)
    logs.mkdir()
    for name, text in {"worker-1.out": "hello", "worker-2.err": "", "raylet.out": "noise"}.items():
        (session / "logs" / name).write_text(text)
    _keep_logs(session.parent, logs)
    assert [(path.name, path.read_text()) for path in logs.iterdir()] == [("worker.out", "hello")]
    assert caplog.text == ""


def test_logs_that_do_not_fit_are_said_and_leave_no_half(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session, logs = tmp_path / "tqppo-ray-1" / "session_2026-01-01", tmp_path / "logs"
    (session / "logs").mkdir(parents=True)
    logs.mkdir()
    for name, size in {"worker-1.out": 10, "worker-2.out": 5000, "worker-3.out": 10}.items():
        (session / "logs" / name).write_bytes(bytes(size))
    with files_of_at_most(1000):
        _keep_logs(session.parent, logs)
    assert [path.name for path in logs.iterdir()] == ["worker.out"]
    assert f"could not be copied to {logs}: File too large" in caplog.text


class SlowStart:
    """A start that times out as Ray does, some times, and leaves a process behind each time."""

    def __init__(self, failures: int, text: str = f"The current node {TOO_SLOW[0]}.") -> None:
        self.failures, self.text, self.left = failures, text, list[subprocess.Popen[bytes]]()

    def __call__(self) -> None:
        if len(self.left) < self.failures:
            self.left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception(self.text)


@pytest.fixture
def no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Ray that other tests of this process share stays."""
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.mark.usefixtures("no_shutdown")
@pytest.mark.parametrize("text", TOO_SLOW)
def test_a_start_that_times_out_is_tried_again_and_leaves_no_process(text: str) -> None:
    start, said = SlowStart(2, f"Ray: {text}."), list[str]()
    start_patiently(start, said.append)
    assert [re.sub(r"load \d+", "load", each) for each in said] == [
        "Ray did not start within 30 s on this busy machine (load); attempt 2 of 4 has 60 s",
        "Ray did not start within 60 s on this busy machine (load); attempt 3 of 4 has 120 s",
    ]
    assert [process.wait(timeout=10) for process in start.left] == [-9, -9]


@pytest.mark.usefixtures("no_shutdown")
def test_a_machine_that_is_too_busy_is_named() -> None:
    start = SlowStart(100)
    with pytest.raises(PreflightError, match="did not start in 4 attempts"):
        start_patiently(start)
    assert [process.wait(timeout=10) for process in start.left] == [-9] * 4


def test_ray_is_given_the_time_that_an_attempt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    calls: list[float] = []

    def registers_late(*_: object) -> str:
        calls.append(time.monotonic())
        if calls[-1] - calls[0] < 0.5:
            raise RuntimeError("the node is not there yet")
        return "node"

    monkeypatch.setattr(services, "get_node", registers_late)
    with _time_to_start(5.0):
        assert services.get_node("address", "id") == "node"
    calls.clear()
    with _time_to_start(0.1), pytest.raises(RuntimeError, match="not there yet"):
        services.get_node("address", "id")
    assert services.get_node is registers_late


def test_another_error_of_a_start_is_not_hidden() -> None:
    start = SlowStart(1, "no space left on device")
    with pytest.raises(Exception, match="no space left"):
        start_patiently(start)
    start.left[0].kill()
    start.left[0].wait()
