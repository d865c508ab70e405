"""Runs inside the vLLM server: receives weights from a process group with the trainer's node, bucket by bucket.

vLLM's own weight transfer needs a GPU; this works with gloo and nccl alike. vLLM mixes the class into its worker
class and refuses names that the worker has already, hence the prefix.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class BucketArguments(TypedDict):
    """See `tqppo.protocols.Bucket`, which this interpreter cannot import."""

    names: list[str]
    dtype: str
    shapes: list[list[int]]


class Receiver:
    rank: int
    device: torch.device
    tqppo_group: distributed_c10d.ProcessGroup

    def tqppo_join(self, *, group: str, host: str, port: int, num_ranks: int, backend: str, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = cast(Any, dist).TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.tqppo_group, _ = distributed_c10d._new_process_group_helper(
            num_ranks,
            1 + self.rank,
            [],
            distributed_c10d.Backend(backend),
            distributed_c10d.PrefixStore(group, store),
            group_name=cast(Any, group),  # torch's type for it differs between versions
            timeout=timeout,
        )

    def tqppo_receive(self, *, buckets: list[BucketArguments]) -> None:
        self.reload_weights(weights_iterator=self.tqppo_stream(buckets))  # type: ignore[attr-defined]

    def tqppo_stream(self, buckets: list[BucketArguments]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets:
            dtype = getattr(torch, bucket["dtype"])
            sizes = [torch.Size(shape).numel() for shape in bucket["shapes"]]
            flat = torch.empty(sum(sizes) * dtype.itemsize, dtype=torch.uint8, device=self.device)
            self.tqppo_group.broadcast(flat, 0).wait()
            tensors = torch.split(flat.view(dtype), sizes)
            for name, tensor, shape in zip(bucket["names"], tensors, bucket["shapes"], strict=True):
                yield name, tensor.view(shape)
