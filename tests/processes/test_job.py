from __future__ import annotations

import os
import sys
import time

import pytest
import ray

from tqppo.devices.seats import NO_CPU
from tqppo.errors import DataError, DeadlineExceeded, WorkerError
from tqppo.processes.hosting import Hosting
from tqppo.processes.job import run_job
from tqppo.processes.ray_launcher import RayLauncher

HERE = Hosting(NO_CPU)

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files
pytestmark = pytest.mark.usefixtures("local_ray")


def refuse() -> None:
    raise DataError("no demonstrations")


def test_a_job_gives_its_result_or_its_error_and_ends_at_its_deadline() -> None:
    assert run_job(RayLauncher(), HERE, 60, "the warm start", os.getpid) != os.getpid()
    with pytest.raises(DataError, match="no demonstrations"):
        run_job(RayLauncher(), HERE, 60, "the warm start", refuse)
    with pytest.raises(WorkerError, match="the warm start: the process died"):
        run_job(RayLauncher(), HERE, 60, "the warm start", lambda: os._exit(1))
    with pytest.raises(DeadlineExceeded, match="the warm start did not finish within 1 s"):
        run_job(RayLauncher(), HERE, 1, "the warm start", lambda: time.sleep(60))
