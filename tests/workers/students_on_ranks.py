"""Run by `test_student_ranks.py` as one process per rank: losses and updates once each, on this rank's rows.

`python students_on_ranks.py FOLDER RANK SIZE CASE…` reads `FOLDER/rows.pt` and leaves metrics and optimizer states.
A case is a loss, an update and a dtype, with colons between them; a single rank computes in float32.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from workers.taught import Class, columns_for, take

from tqppo.workers.process.ranks import Ranks
from tqppo.workers.student import Student


def main(folder: Path, rank: int, size: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{size}-{len(cases)}.ranks", rank=rank, world_size=size
        )
    given = torch.load(folder / "rows.pt", weights_only=False)
    school, rows = Class(*given["school"]), given["rows"]
    for loss, update, dtype in (case.split(":") for case in cases):
        # With four ranks, one has no rows at all; the task's reward takes part in addition to some losses.
        spec = school.spec(loss, update, task=loss in ("k2", "k3", "reverse_kl_topk", "forward_kl"))
        model = replace(spec.model, dtype=dtype if size > 1 else "float32")
        student = Student(replace(spec, model=model, micro_batch_tokens=24), ranks=Ranks(rank, size))
        student.start()
        mine = take(rows, list(range(6))[rank :: min(size, 3)] if rank < 3 else [])
        metrics = student.update(columns_for(student, mine), step=1)
        student.save(str(folder / f"{size}-{loss}:{update}:{dtype}"))
        if rank == 0:
            (folder / f"{size}-{loss}:{update}:{dtype}.json").write_text(json.dumps(metrics))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
