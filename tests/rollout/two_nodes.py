"""An engine on another node than the trainer's gets every version of the weights: `python two_nodes.py BACKEND SYNC`.

Two Ray nodes on this machine, one CPU each: the actor takes the first, the engine has to go to the second.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from tqppo.contracts.rollout import publish_head
from tqppo.processes.ray_launcher import RayLauncher
from tqppo.protocols import EngineSpec, WeightSource
from tqppo.queue.client import Queue
from tqppo.rewards.scorer import ScorerSpec
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.worker import RolloutSpec
from tqppo.tiny.model import write_tiny_model
from tqppo.weights.verify import Probe
from tqppo.workers.actor import Actor
from tqppo.workers.process.group import WorkerGroup
from tqppo.workers.specs import ModelSpec, RoleSpec

MIB = 1 << 20
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(32)]


def published(folder: Path, version: int, node: str) -> tuple[WeightSource, Probe]:
    write_tiny_model(folder, seed=version)
    publish_head(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    expected = logprobs[range(len(TOKENS) - 1), TOKENS[1:]].tolist()
    return WeightSource(str(folder), version, node), Probe(TOKENS, expected, 1e-4)


def groups(pool: RolloutPool) -> list[str]:
    assert pool.sender is not None, "the engine got its weights from the trainer's own file"
    return ray.get(pool.sender[1].__ray_call__.remote(lambda self: self.groups))


def copies(worker: Any) -> list[str]:
    return ray.get(worker.actor.__ray_call__.remote(lambda self: [str(each) for each in self.copies._folders]))


def kill_server(worker: Any) -> None:
    """The server itself, not its guard."""
    guard = ray.get(worker.actor.__ray_call__.remote(lambda self: self.engine.servers.process.pid))
    psutil.Process(guard).children()[0].kill()


def check(pool: RolloutPool, folder: Path, node: str, sync: str) -> None:
    (worker,) = pool.workers
    for version in (1, 2, 3):
        source, probe = published(folder / f"v{version}", version, node)
        pool.load_weights(source, probe)
        print(f"version {version} is there, by {'a group' if groups(pool) else copies(worker)}", flush=True)
    if sync == "file":
        assert [Path(each).name for each in copies(worker)] == ["v2", "v3"]
        assert not groups(pool)
        return
    (first,) = groups(pool)
    assert not copies(worker)
    kill_server(worker)  # its successor has no weights but the sender's
    pool.load_weights(source, probe)
    assert groups(pool) != [first], "a new server, a new group"


def main(backend: str, sync: str) -> None:
    arguments = {"num_cpus": 1, "object_store_memory": 100 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**arguments, "include_dashboard": False})
    cluster.add_node(**arguments)
    ray.init(address=cluster.address, log_to_driver=False)
    folder = Path(tempfile.mkdtemp())
    model = write_tiny_model(folder / "model")
    actor = WorkerGroup("actor", Actor, ranks=1, spec=RoleSpec(ModelSpec(str(model))))
    actor.start(RayLauncher())
    actor.ready()
    node = actor.call(Actor.publish, 0).node
    assert node in {each["NodeID"] for each in ray.nodes()}
    spec = RolloutSpec(
        backend,
        EngineSpec(str(model), max_context_tokens=128, log_dir=str(folder), max_running=16),
        str(model),
        ScorerSpec(),
        weight_sync="auto" if backend == "embedded" or sync == "broadcast" else sync,
    )
    queue = Queue.create("simple", budget_bytes=16 * MIB)
    pool = RolloutPool(spec, queue, endpoints=[], replicas=1, timeout_s=280)
    try:
        pool.start(RayLauncher())
        pool.ready()
        assert pool.nodes != [node], "both are on one node"
        check(pool, folder, node, sync)
    finally:
        pool.close()
        actor.close()
        queue.close()
        ray.shutdown()
        cluster.shutdown()
    print("all is well")


if __name__ == "__main__":
    main(*sys.argv[1:])
