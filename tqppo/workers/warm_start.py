"""Supervised steps on demonstrations, before reinforcement learning: for any model, all of it or its adapters.

One process does it, on the device of the actor's first rank. What it writes is a whole model: adapters are merged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from tqppo.tiny.warm_start import IGNORED, Demonstrations, batch, make_once
from tqppo.weights import publish as weights
from tqppo.workers.compute.loading import compute_dtype
from tqppo.workers.compute.model import PolicyModel, add_lora, load_policy
from tqppo.workers.export import add_tokenizer
from tqppo.workers.specs import ModelSpec

GRAD_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class WarmStartSpec:
    """Which model learns from the demonstrations, and how."""

    model: ModelSpec
    tokenizer: str
    steps: int
    batch_size: int  # demonstrations per step
    lr: float
    seed: int
    micro_batch_tokens: int  # of one forward, padding included
    is_chat: bool = True
    device: str = "cpu"


def warm_start(spec: WarmStartSpec, demonstrations: Demonstrations, folder: str) -> str:
    """Train the model of `spec`, and write it to `folder`, unless the same was done before; returns the folder.

    `demonstrations` are those of all steps, in order.
    """
    told = hashlib.sha256(json.dumps(list(demonstrations)).encode()).hexdigest()
    made_from = {**asdict(spec), "demonstrations": told, "device": "any"}

    def make(work: Path) -> list[float]:
        model = _load(spec)
        losses = list(_losses(model, spec, demonstrations))
        work.mkdir(parents=True)
        weights.save_description(model.causal_lm, spec.model.path, work, torch.float32)
        weights.export(work, weights.entries(model.causal_lm, torch.float32))
        add_tokenizer(spec.model, work)
        return losses

    return str(make_once(Path(folder), made_from, make))


def _load(spec: WarmStartSpec) -> PolicyModel:
    device = torch.device(spec.device)
    model = load_policy(spec.model, device)
    if spec.model.lora_rank:
        add_lora(model, spec.model, seed=spec.seed)
    return model.to(device)


def _losses(model: PolicyModel, spec: WarmStartSpec, demonstrations: Demonstrations) -> Iterator[float]:
    """Take the steps, and yield the mean loss of a token of each."""
    tokenizer = AutoTokenizer.from_pretrained(spec.tokenizer, trust_remote_code=spec.model.trust_remote_code)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=spec.lr, weight_decay=0.0)
    for step in range(spec.steps):
        shown = demonstrations[step * spec.batch_size : (step + 1) * spec.batch_size]
        tokens, labels = batch(tokenizer, shown, is_chat=spec.is_chat)
        loss = _backward(model, spec, tokens, labels)
        nn.utils.clip_grad_norm_(learning, GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _backward(model: PolicyModel, spec: WarmStartSpec, tokens: Tensor, labels: Tensor) -> float:
    """Add up the gradients of a batch, some rows at a time; returns its mean loss. Both tensors are [B, T]."""
    device = torch.device(spec.device)
    dtype = compute_dtype(spec.model.dtype, device)
    rows = max(1, spec.micro_batch_tokens // tokens.shape[1])
    num_labels = int((labels[:, 1:] != IGNORED).sum())
    total = 0.0
    for start in range(0, len(tokens), rows):
        part, targets = (each[start : start + rows].to(device) for each in (tokens, labels))
        smaller = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
        with smaller:
            logits = model.causal_lm(input_ids=part, use_cache=False).logits[:, :-1]  # [b, T - 1, V]
        summed = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (summed / num_labels).backward()  # type: ignore[no-untyped-call]
        total += summed.item()
    return total / num_labels
