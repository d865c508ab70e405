"""Trains on two Ray nodes of this machine, each just large enough for half of the run's processes.

`python two_nodes.py RUNS train --config …` is `tqppo train --config …` on them, with the runs in the folder RUNS.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster

CPUS = 1  # of each node: three roles share a CPU, so that three of the six processes fit on it
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
        busy: set[str] = set()
        while run.poll() is None:
            left = available_resources_per_node()
            busy |= {node for node, resources in left.items() if resources.get("CPU", 0.0) < CPUS}
            time.sleep(0.5)
        print(f"processes on {len(busy)} nodes", flush=True)
        return run.returncode
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
