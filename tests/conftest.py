"""Fixtures that several test folders share, the marker `ray`, and which tests stay in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

hypothesis.settings.register_profile("tqppo", deadline=None)  # other processes may have the cores
hypothesis.settings.load_profile("tqppo")

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the fixture `local_ray`, also through another one, and all whole runs."""
    for item in items:
        if "local_ray" in getattr(item, "fixturenames", ()) or item.path.is_relative_to(HERE / "e2e"):
            item.add_marker(pytest.mark.ray)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # what takes longest must not start last


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which `make` uses and a plain `pytest` does not
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        """Decides which tests run in one process, one after the other."""

        def _split_scope(self, nodeid: str) -> str:
            return place(nodeid)

    return ByPlace(config, log)


def place(nodeid: str) -> str:
    """Whole runs go anywhere; tests of one file stay together, and those of engines, which look at all of /dev/shm."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/e2e/"):
        return nodeid
    return "engines" if path.startswith("tests/backends/rollout/") else path


@pytest.fixture(scope="session", autouse=True)
def _no_ray_without_its_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    """When tests are chosen with `not ray`, one that starts Ray in this process fails."""
    if "not ray" not in request.config.getoption("markexpr"):
        yield
        return
    import ray

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("this test starts Ray: let it use the fixture `local_ray`, or mark it with `ray`")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", refuse)
        yield


@pytest.fixture(scope="session")
def imported_once() -> Iterator[None]:
    """Workers of the Rays of this session are forked from one process, which has imported what most of them need."""
    from tqppo.processes.fork_server import fork_server

    with fork_server(["tqppo.run.build", "tqppo_backends.rollout.embedded"]):
        yield


@pytest.fixture(scope="module")
def local_ray(imported_once: None) -> Iterator[None]:
    """A private Ray on this machine, shared by the tests of a file; its files are in a folder of its own.

    It ends with the file: a test of another file may run a whole command in this process, which starts its own Ray.
    """
    import ray

    from tqppo.run.cluster import start_patiently
    from tqppo.run.lean_ray import lean_ray
    from tqppo.run.ray_token import new_token

    folder = tempfile.mkdtemp(prefix="tqppo-tests-")  # a short path: Ray puts sockets there, whose paths have 107 bytes
    with new_token(Path(folder)):  # Ray would otherwise keep what an earlier test of this process has set
        with lean_ray():
            start_patiently(
                lambda: ray.init(
                    address="local",
                    num_cpus=16,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=512 * 1024 * 1024,
                    _temp_dir=folder,
                )
            )
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama-style model in a Hugging Face folder."""
    from tqppo.tiny.model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
