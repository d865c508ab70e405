"""Fixtures that several test folders share, the marker `ray`, and which tests run in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A test that uses one of these, itself or through another fixture, starts Ray. Others say so with `@pytest.mark.ray`.
RAY_FIXTURES = {"local_ray", "cli"}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses and pytest-xdist distributes
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if RAY_FIXTURES & fixtures:
            item.add_marker(pytest.mark.ray)
        if group := _group(item, fixtures):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # what takes longest must not start last


def _group(item: pytest.Item, fixtures: set[str]) -> str:
    """Tests of one group run in one process: those of a folder that share a Ray, those that look at all of /dev/shm."""
    if "shared_memory_is_left_as_it_was" in fixtures:
        return "shared-memory"
    return f"ray-{item.path.relative_to(Path(__file__).parent).parts[0]}" if "local_ray" in fixtures else ""


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
def local_ray() -> Iterator[None]:
    """A private Ray on this machine, shared by all tests of this process; its files are in a folder of its own."""
    import ray

    folder = tempfile.mkdtemp(prefix="tqppo-tests-")  # a short path: Ray puts sockets there, whose paths have 107 bytes
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * 1024 * 1024,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama-style model in a Hugging Face folder."""
    from tqppo.tiny.model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
