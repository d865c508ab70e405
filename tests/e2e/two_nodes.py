"""Trains on two Ray nodes of this machine, each just large enough for half of the run's processes.

`python two_nodes.py RUNS train --config …` is `tqppo train --config …` on them, with the runs in the folder RUNS. Its
last line says on which of the nodes each kind of process was seen, as JSON: {"RolloutWorker": ["second"], …}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict

os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # on a busy machine a node takes longer than Ray's 30 s

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

CPUS = 1  # of each node; roles share a CPU as the config says, so that half of the processes fit on it
MIB = 1 << 20


def main(runs: str, arguments: list[str]) -> int:
    sizes = {"num_cpus": CPUS, "object_store_memory": 200 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    cluster.add_node(**sizes)
    try:
        command = [sys.executable, "-c", "from tqppo.cli import app; app()", *arguments]
        command += ["--set", f'cluster.address="{cluster.address}"']
        run = subprocess.Popen(command, env={**os.environ, "TQPPO__RUN__DIR": runs, "OMP_NUM_THREADS": "1"})
        ray.init(address=cluster.address, log_to_driver=False)
        places: dict[str, set[str]] = defaultdict(set)
        while run.poll() is None:
            for actor in actors(actor_state_name="ALIVE").values():
                is_head = actor["Address"]["NodeID"] == cluster.head_node.node_id
                places[actor["ActorClassName"]].add("head" if is_head else "second")
            time.sleep(0.5)
        print(json.dumps({name: sorted(nodes) for name, nodes in places.items()}), flush=True)
        return run.returncode
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
