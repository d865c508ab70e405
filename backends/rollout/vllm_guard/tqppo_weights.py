"""Runs inside the vLLM server: loads weights from a folder, or bucket by bucket from a process group with the
trainer's node and other engines, and says by checksums what it has.

vLLM's own weight transfer needs a GPU; this works with gloo and nccl alike. vLLM mixes the class into its worker
class and refuses names that the worker has already, hence the prefix.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed import distributed_c10d


class BucketArguments(TypedDict):
    """See `tqppo.protocols.Bucket`, which this interpreter cannot import."""

    names: list[str]
    dtype: str
    shapes: list[list[int]]


def load_checksum() -> Callable[[torch.Tensor], str]:
    """The function of `tqppo.weights.checksum`, which this interpreter cannot import by name."""
    spec = importlib.util.spec_from_file_location("tqppo_checksum", os.environ["TQPPO_CHECKSUM"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[torch.Tensor], str] = module.checksum
    return found


checksum = load_checksum()


def read_folder(folder: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder, read to the device, where checksums take no time."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            names: list[str] = list(file.keys())
            for name in names:
                yield name, file.get_tensor(name)


class Receiver:
    rank: int
    device: torch.device
    tqppo_group: distributed_c10d.ProcessGroup
    tqppo_given: dict[str, str]

    def tqppo_join(
        self, *, group: str, host: str, port: int, first_rank: int, num_ranks: int, backend: str, timeout_s: float
    ) -> None:
        """Join a group in place of the one before, which ended with another of its engines."""
        timeout = timedelta(seconds=timeout_s)
        store = cast(Any, dist).TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.tqppo_group, _ = distributed_c10d._new_process_group_helper(
            num_ranks,
            first_rank + self.rank,
            [],
            distributed_c10d.Backend(backend),
            distributed_c10d.PrefixStore(group, store),
            group_name=cast(Any, group),  # torch's type for it differs between versions
            timeout=timeout,
        )

    def tqppo_receive(self, *, buckets: list[BucketArguments]) -> None:
        self.tqppo_reload(self.tqppo_stream(buckets))

    def tqppo_load(self, *, folder: str) -> None:
        self.tqppo_reload(read_folder(folder, self.device))

    def tqppo_reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load these tensors and keep the checksum of each as it came."""
        self.tqppo_given = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                self.tqppo_given[name] = checksum(tensor)
                yield name, tensor

        self.reload_weights(weights_iterator=noted())  # type: ignore[attr-defined]

    def tqppo_checksums(self) -> dict[str, Any]:
        """What came and what is there now. On a CPU vLLM packs most matrices, and their parameters are empty."""
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]
        held = {name: checksum(each) for name, each in model.named_parameters() if each.numel()}
        return {"given": self.tqppo_given, "held": held, "parts": getattr(model, "packed_modules_mapping", {})}

    def tqppo_stream(self, buckets: list[BucketArguments]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets:
            dtype = getattr(torch, bucket["dtype"])
            sizes = [torch.Size(shape).numel() for shape in bucket["shapes"]]
            flat = torch.empty(sum(sizes) * dtype.itemsize, dtype=torch.uint8, device=self.device)
            self.tqppo_group.broadcast(flat, 0).wait()
            tensors = torch.split(flat.view(dtype), sizes)
            for name, tensor, shape in zip(bucket["names"], tensors, bucket["shapes"], strict=True):
                yield name, tensor.view(shape)
