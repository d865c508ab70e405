"""Runs inside the vLLM server: takes weights from a process group with the trainer's node, bucket by bucket.

vLLM's own weight transfer needs a GPU; this works with gloo and nccl alike. Mixed into its worker class, which
refuses names that it already has.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class Receiver:
    rank: int
    device: torch.device
    tqppo_group: Any

    def tqppo_join(self, *, group: str, host: str, port: int, num_ranks: int, backend: str, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self.tqppo_group, _ = distributed_c10d._new_process_group_helper(
            num_ranks,
            1 + self.rank,
            [],
            distributed_c10d.Backend(backend),
            dist.PrefixStore(group, store),
            group_name=cast(Any, group),  # a plain string in older versions
            timeout=timeout,
        )

    def tqppo_receive(self, *, buckets: list[dict[str, Any]]) -> None:
        self.reload_weights(weights_iterator=self.tqppo_stream(buckets))  # type: ignore[attr-defined]

    def tqppo_stream(self, buckets: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets:
            dtype = getattr(torch, bucket["dtype"])
            sizes = [torch.Size(shape).numel() for shape in bucket["shapes"]]
            flat = torch.empty(sum(sizes) * dtype.itemsize, dtype=torch.uint8, device=self.device)
            self.tqppo_group.broadcast(flat, 0).wait()
            tensors = flat.view(dtype).split(sizes)
            for name, tensor, shape in zip(bucket["names"], tensors, bucket["shapes"], strict=True):
                yield name, tensor.view(shape)
