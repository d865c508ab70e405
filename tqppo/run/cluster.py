"""Ray for one run: a private one on this machine that ends with the run, or a cluster that runs already.

Imported only by `train` and `resume`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tqppo.errors import PreflightError
from tqppo.processes.lifeline import Watcher, descendants, end
from tqppo.processes.reaper import claim, reap
from tqppo.run.worker_logs import keep_worker_logs
from tqppo.weights import location

if TYPE_CHECKING:
    from tqppo.processes.ray_calls import RayLauncher

log = logging.getLogger(__name__)

PRIVATE_PREFIX = "tqppo-ray-"
ANSWER_TIMEOUT_S = 10.0
START_ATTEMPTS = 4
TIMED_OUT = "timed out during startup"  # Ray raises a plain Exception with this text
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # enough for metadata; tensors live in tqppo's own storage


@contextmanager
def ray_cluster(
    address: str,
    *,
    num_cpus: float,
    object_store_bytes: int,
    logs: Path,
    num_gpus: int | None = None,
    while_starting: Callable[[], object] = lambda: None,
) -> Iterator[RayLauncher]:
    """Connect to `address`, or start a private Ray whose logs end up in `logs`. Ray looks for GPUs unless told.

    `while_starting` runs in a thread while a private Ray's processes start: this process only waits for them.
    """
    _quiet()
    if address:
        with _connected(address) as launcher:
            yield launcher
    else:
        size = {"num_cpus": max(1, round(num_cpus)), "num_gpus": num_gpus}
        size["object_store_memory"] = max(object_store_bytes, OBJECT_STORE_BYTES)
        with _private(size, logs, while_starting) as launcher:
            yield launcher


@contextmanager
def _connected(address: str) -> Iterator[RayLauncher]:
    import ray

    from tqppo.processes.ray_calls import RayLauncher

    _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise PreflightError(f"no Ray cluster answers at cluster.address = {address!r}: {error}") from None
    try:
        yield RayLauncher()
    finally:
        ray.shutdown()


@contextmanager
def _private(size: Mapping[str, int | None], logs: Path, while_starting: Callable[[], object]) -> Iterator[RayLauncher]:
    import ray

    from tqppo.processes.ray_calls import RayLauncher

    parent = Path(tempfile.gettempdir())
    reap(parent, PRIVATE_PREFIX)
    owned = claim(parent / f"{PRIVATE_PREFIX}{os.getpid()}-{secrets.token_hex(3)}")
    folder = str(owned.folder)
    watcher = Watcher([folder, *location.patterns()])
    start = partial(ray.init, "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        with ThreadPoolExecutor(1) as other_thread:
            other_thread.submit(while_starting)
            start_patiently(partial(start, _temp_dir=folder, **size))
        watcher.watch(descendants(os.getpid()))
        yield RayLauncher()
    finally:
        ray.shutdown()
        _keep_logs(owned.folder, logs)
        owned.release()
        watcher.dismiss()


def start_patiently(start: Callable[[], object]) -> None:
    """Call `start`, which starts Ray. A busy machine can take longer than the 30 s that Ray allows: then try again."""
    import ray

    ours = set(descendants(os.getpid()))
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            start()
            return
        except Exception as error:
            if TIMED_OUT not in str(error):
                raise
        ray.shutdown()
        end(set(descendants(os.getpid())) - ours)
        log.warning("Ray did not start within its limit of 30 s (attempt %d of %d)", attempt, START_ATTEMPTS)
    raise PreflightError(
        f"Ray did not start in {START_ATTEMPTS} attempts of 30 s each: this machine has {os.cpu_count()} cores and a "
        f"load of {os.getloadavg()[0]:.0f}. Try again when it is less busy"
    )


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


def _keep_logs(session: Path, logs: Path) -> None:
    """Copy what Ray's workers printed into the run's folder. A failure, such as a full disk, must not hide why a run
    ended, nor keep Ray's own folder from being removed; half a copy gives its room back."""
    try:
        keep_worker_logs(session, logs)
    except OSError as error:
        log.warning("the logs of Ray's workers could not be copied to %s: %s", logs, error.strerror)
