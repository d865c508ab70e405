"""Runs inside SGLang's schedulers, as a loader of weights that loads nothing: it says by checksums what is there.

`--custom-weight-loader tqppo_weights.report` lets `/update_weights_from_tensor` call it. The name of the only tensor is
a folder, in which each process writes a file.
"""

import json
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # as SGLang joins them
checksum: Callable[[torch.Tensor], str] = runpy.run_path(os.environ["TQPPO_CHECKSUM"])["checksum"]


def report(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    ((folder, _),) = named_tensors
    held = {name: checksum(each.data) for name, each in model.named_parameters() if each.numel()}
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps({"held": held, "parts": PARTS}))
