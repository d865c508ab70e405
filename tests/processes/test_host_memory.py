from __future__ import annotations

import pytest
import ray

from tqppo.errors import OutOfMemory
from tqppo.processes.host_memory import out_of_memory
from tqppo.processes.hosting import cause_of
from tqppo.processes.ray_launcher import _cause
from tqppo.queue.link.replies import RayReply

# What Ray 2.60 says, shortened.
KILLED = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: c282f2eafb62ce9c478812b2c63d8aba) was 4.15GB used / 23.54GB limit (0.176186)
OOM kill reason: Memory usage 4154245120B exceeded threshold of 505495872B (2.0% of 25274793984B limit)
Selected to kill: (Actor(a5ba): job ID=01000000, task name=A.__init__, required resources={}, pid=25365, \
actual memory used=0.27GB, worker ID=d4f9)
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
3533\t0.35\tpython train
11597\t0.28\tray::RankProcess
15487\t0.27\tray::RolloutWorker
15511\t0.18\tray::Estimator
Refer to the documentation"""


def test_the_process_its_memory_that_of_the_node_and_what_to_lower_are_said() -> None:
    said = str(out_of_memory(Exception(KILLED), "critic rank 1, in update"))
    assert said.startswith(
        "critic rank 1, in update: Ray ended the process (process 25365, which used 0.27GB) because its node ran out "
        "of memory: node c282f2eafb62ce9c at 192.0.2.2 has 4.15GB of 23.54GB in use."
    )
    assert "process 3533\t0.35\tpython train" in said
    assert "15511" not in said
    assert "lower storage.budget_gb" in said
    assert "documentation" not in said


def test_an_actor_that_ray_s_killer_ended_is_told_as_such_by_every_way_of_calling() -> None:
    error = ray.exceptions.OutOfMemoryError(KILLED)
    launched = cause_of(_cause(error), "the rollout")
    assert isinstance(launched, OutOfMemory)
    reply: RayReply[None] = RayReply(None, "the queue's index", 1.0)
    with pytest.raises(OutOfMemory, match=r"the queue's index: Ray ended the process \(process 25365"):
        reply._raise_cause(error)


def test_several_that_were_ended_at_once_are_all_named() -> None:
    second = KILLED.replace("Top 10", "Selected to kill: (Actor(b): pid=77, actual memory used=1.5GB, x)\nTop 10")
    assert "Ray ended 2 processes (25365, which used 0.27GB; 77, which used 1.5GB) because" in str(
        out_of_memory(Exception(second), "the rollout")
    )


def test_a_message_of_another_version_is_still_out_of_memory() -> None:
    said = str(out_of_memory(Exception("killed due to the node running low on memory"), "the rollout"))
    assert said.startswith("the rollout: Ray ended the process because its node ran out of memory.")


def test_other_deaths_are_left_alone() -> None:
    guesses = (
        "The actor died unexpectedly before finishing this task. There are some potential root causes. (1) The process "
        "is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."
    )
    assert out_of_memory(Exception(guesses), "x") is None
