"""Ray for one run: a private one on this machine that ends with the run, or a cluster that runs already.

Imported only by `train` and `resume`.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqppo.errors import DeadlineExceeded, PreflightError
from tqppo.processes import ray_health
from tqppo.processes.deadline import within
from tqppo.processes.lifeline import Watcher, adopt_orphans, descendants, end
from tqppo.processes.reaper import claim, reap
from tqppo.queue.storage import FOLDER_PREFIX
from tqppo.run.lean_ray import lean_ray
from tqppo.run.ray_token import new_token
from tqppo.run.worker_logs import keep_worker_logs
from tqppo.weights import location

if TYPE_CHECKING:
    from tqppo.processes.ray_launcher import RayLauncher

log = logging.getLogger(__name__)

PRIVATE_PREFIX = "tqppo-ray-"
SESSIONS = "r"  # within the folder: Ray opens its own to all users; short, because the paths of sockets have 107 bytes
ANSWER_TIMEOUT_S = 10.0
START_ATTEMPTS = 4
START_POLL_S = 0.1
RAY_LIMIT_S = 30.0  # Ray's own, for its raylet to start
GCS_LIMIT = "RAY_gcs_server_port_wait_time_s"  # the variable for its control service
CONNECT_TIMEOUT_S = 120.0  # for a cluster to take this process in
SHUTDOWN_TIMEOUT_S = 20.0
LOST_SHUTDOWN_S = 2.0  # where Ray's own processes are gone, there is nothing to wait for
SERVICES = {"gcs_server": "its control service (GCS)", "raylet": "the raylet of this node"}
TOO_SLOW = ("timed out during startup", "Failed to start GCS")  # texts of the plain exceptions that Ray raises
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # enough for metadata; tensors live in tqppo's own storage


@dataclass(frozen=True)
class Hooks:
    """What else happens: `while_starting` runs in a thread while a private Ray starts, which this process only
    waits for; `warn` gets what delays them; `on_stuck` gets why, if Ray dies and a call into it does not return."""

    while_starting: Callable[[], object] = lambda: None
    warn: Callable[[str], None] = log.warning
    on_stuck: Callable[[str], None] = ray_health.leave


@contextmanager
def ray_cluster(
    address: str,
    *,
    num_cpus: float,
    object_store_bytes: int,
    logs: Path,
    num_gpus: int | None = None,
    hooks: Hooks | None = None,
) -> Iterator[RayLauncher]:
    """Connect to `address`, or start a private Ray whose logs end up in `logs`. Ray looks for GPUs unless told."""
    hooks = hooks or Hooks()
    _quiet()
    if address:
        with _connected(address, hooks) as launcher:
            yield launcher
    else:
        size = {"num_cpus": max(1, round(num_cpus)), "num_gpus": num_gpus}
        size["object_store_memory"] = max(object_store_bytes, OBJECT_STORE_BYTES)
        with _private(size, logs, hooks) as launcher:
            yield launcher


@contextmanager
def _connected(address: str, hooks: Hooks) -> Iterator[RayLauncher]:
    import ray

    from tqppo.processes.ray_launcher import RayLauncher

    _check_answers(address)
    try:
        connect = partial(ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR)
        within(CONNECT_TIMEOUT_S, connect, f"connecting to the Ray cluster at cluster.address = {address!r}")
    except ConnectionError as error:
        raise PreflightError(f"no Ray cluster answers at cluster.address = {address!r}: {error}") from None
    try:
        with ray_health.watched(_services_of_cluster(), hooks.on_stuck):
            yield RayLauncher()
    finally:
        _shut_down()
        ray_health.forget()


@contextmanager
def _private(size: Mapping[str, int | None], logs: Path, hooks: Hooks) -> Iterator[RayLauncher]:
    import ray

    from tqppo.processes.ray_launcher import RayLauncher

    parent = Path(tempfile.gettempdir())
    reap(parent, PRIVATE_PREFIX)
    owned = claim(parent / f"{PRIVATE_PREFIX}{os.getpid()}-{secrets.token_hex(3)}")
    session = owned.folder / SESSIONS
    others = set(descendants(os.getpid()))
    watcher = guard(owned.folder)
    start = partial(ray.init, "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    started: list[int] = []
    try:
        with new_token(owned.folder), _shut_down_after(started):
            with lean_ray(), ThreadPoolExecutor(1) as other_thread:
                other_thread.submit(hooks.while_starting)
                start_patiently(partial(start, _temp_dir=str(session), **size), hooks.warn)
            adopt_orphans()  # workers of a raylet that dies stay below this process, and are ended with the rest
            started += [pid for pid in descendants(os.getpid()) if pid not in others | {watcher.pid}]
            watcher.watch(started)
            end_workers = partial(_end_all, started)
            with ray_health.watched(ray_health.services_of(SERVICES, started), hooks.on_stuck, on_lost=end_workers):
                yield RayLauncher()
    finally:
        _keep_logs(session, logs)
        owned.release()
        watcher.close()


def guard(*folders: Path) -> Watcher:
    """A guard that removes these folders, this process's published weights and the queue's rows, however it ends."""
    queues = [str(place / f"{FOLDER_PREFIX}*") for place in location.parents()]
    return Watcher([*map(str, folders), *location.patterns()], reap=queues)


@contextmanager
def _shut_down_after(started: Sequence[int]) -> Iterator[None]:
    """Disconnect from a private Ray at the end, and end the processes that it started."""
    try:
        yield
    finally:
        _shut_down()
        _end_all(started)
        adopt_orphans(False)
        ray_health.forget()


def _services_of_cluster() -> list[ray_health.RayService]:
    """The control service and this node's raylet, of a cluster that this process is connected to."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    found: list[ray_health.RayService] = [ray_health.RemoteService(SERVICES["gcs_server"], host.strip("[]"), int(port))]
    here = ray.get_runtime_context().get_node_id()
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    for node in nodes():
        if node["NodeID"] == here:
            address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
            found.append(ray_health.RemoteService(SERVICES["raylet"], address, port))
    return found


def _end_all(started: Sequence[int]) -> None:
    """End the processes that Ray started, and workers whose raylet is gone, with everything below them."""
    workers = [pid for pid in descendants(os.getpid()) if _is_worker(pid)]
    end([*started, *workers])


def _is_worker(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def _shut_down() -> None:
    """Disconnect from Ray. A shutdown that does not return is left to its thread: the processes are ended anyway."""
    import ray

    timeout_s = LOST_SHUTDOWN_S if ray_health.lost() else SHUTDOWN_TIMEOUT_S
    try:
        within(timeout_s, ray.shutdown, "Ray's shutdown")
    except DeadlineExceeded as error:
        atexit.unregister(ray.shutdown)  # it would not return at the end of this process either
        log.warning("%s; its processes are ended", error)


def start_patiently(start: Callable[[], object], warn: Callable[[str], None] = log.warning) -> None:
    """Call `start`, which starts Ray. A busy machine can take longer than Ray allows: then try again, for longer."""
    import ray

    ours, limit_s = set(descendants(os.getpid())), RAY_LIMIT_S
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _time_to_start(limit_s):
                start()
            return
        except Exception as error:
            if not any(text in str(error) for text in TOO_SLOW):
                raise
        within(SHUTDOWN_TIMEOUT_S, ray.shutdown, "Ray's shutdown after a start that failed")
        end(set(descendants(os.getpid())) - ours)
        if attempt < START_ATTEMPTS:
            warn(
                f"Ray did not start within {limit_s:g} s on this busy machine (load {os.getloadavg()[0]:.0f}); "
                f"attempt {attempt + 1} of {START_ATTEMPTS} has {2 * limit_s:g} s"
            )
            limit_s *= 2
    raise PreflightError(
        f"Ray did not start in {START_ATTEMPTS} attempts, the last of {limit_s:g} s: this machine has {os.cpu_count()} "
        f"cores and a load of {os.getloadavg()[0]:.0f}. Try again when it is less busy"
    )


@contextmanager
def _time_to_start(limit_s: float) -> Iterator[None]:
    """Let Ray look for its own node for so long: its limit of 30 s is a constant inside a function."""
    from ray._private import services

    look: Callable[..., object] = services.get_node

    def patient(*arguments: object, **named: object) -> object:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return look(*arguments, **named)
            except RuntimeError:  # it has not registered yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(START_POLL_S)

    before = os.environ.get(GCS_LIMIT)
    os.environ[GCS_LIMIT] = before or str(round(limit_s))
    services.get_node = patient
    try:
        yield
    finally:
        services.get_node = look
        if before is None:
            del os.environ[GCS_LIMIT]


def _check_answers(address: str) -> None:
    """Raise `PreflightError` if nothing listens at `host:port`: Ray itself would try for minutes before it says so."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "/" in host:  # `auto`, or a client's address, which Ray resolves
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise PreflightError(f"no Ray cluster answers at cluster.address = {address!r}: {error}") from None


def _quiet() -> None:
    """Set Ray's defaults: workers keep this process's priority, and no usage is reported."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # Ray's own record of every call, which only grows


def _keep_logs(session: Path, logs: Path) -> None:
    """Copy what Ray's workers printed into the run's folder. A failure, such as a full disk, must not hide why a run
    ended, nor keep Ray's own folder from being removed; half a copy gives its room back."""
    try:
        keep_worker_logs(session, logs)
    except OSError as error:
        log.warning("the logs of Ray's workers could not be copied to %s: %s", logs, error.strerror)
