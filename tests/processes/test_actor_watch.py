from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import ray

from tqppo.errors import WorkerError
from tqppo.processes import stillness
from tqppo.processes.actor_watch import ActorWatch
from tqppo.processes.hosting import results
from tqppo.processes.ray_launcher import RayCall

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files
pytestmark = pytest.mark.usefixtures("local_ray")


@ray.remote(num_cpus=0)
class Sleeper:
    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return 1


def test_a_stopped_actor_is_named_and_one_that_only_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stillness, "STILL_S", 4.0)
    sleeper = Sleeper.remote()
    watch = ActorWatch({"critic rank 0": sleeper})
    pid = ray.get(sleeper.pid.remote())
    assert results([RayCall(sleeper.sleep.remote(12))], 60, "values", watch=watch) == [1]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match=rf"values: critic rank 0 stands still: .*stopped.*process {pid} on node"):
            results([RayCall(sleeper.sleep.remote(1))], 60, "values", watch=watch)
    finally:
        os.kill(pid, signal.SIGCONT)
        ray.kill(sleeper)
