"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A private Ray on this machine, shared by the whole test run."""
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * 1024 * 1024,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama-style model in a Hugging Face folder."""
    from tqppo.tiny.model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
