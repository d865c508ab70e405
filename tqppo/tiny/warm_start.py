"""Makes a tiny model and trains it on its task for a few supervised steps. `tiny.prepare` calls it.

Reinforcement learning from random weights learns nothing, because no sample is ever right. Pretrained models need no
warm start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

from tqppo import space
from tqppo.tiny.model import TinyShape, save, write_tiny_model
from tqppo.tiny.tokenizer import byte_tokenizer

DONE = "tqppo_warm_start.json"  # written last: a folder without it is not a finished model
Demonstrations = Sequence[tuple[list[dict[str, object]], str]]
IGNORED = -100


def prepare(
    folder: str | Path,
    *,
    model: TinyShape,
    demonstrations: Demonstrations,
    steps: int = 25,
    batch_size: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
) -> Path:
    """Make the model unless `folder` holds one made from the same arguments; the same arguments give the same bytes."""
    seen = hashlib.sha256(json.dumps(demonstrations[0]).encode()).hexdigest()
    made_from = {"model": {**model, "seed": seed}, "steps": steps, "batch_size": batch_size, "lr": lr, "first": seen}

    def make(work: Path) -> list[float]:
        with quiet_on_one_thread():
            write_tiny_model(work, seed=seed, **model)
            return _train(work, demonstrations, steps=steps, batch_size=batch_size, lr=lr, seed=seed) if steps else []

    return make_once(Path(folder), made_from, make)


def make_once(folder: Path, made_from: Mapping[str, object], make: Callable[[Path], list[float]]) -> Path:
    """Have `make` write a model into `folder`, unless one made from the same things is there; it returns its losses.

    The work happens in a folder beside it that is renamed at the end, so that a killed run never leaves half a model.
    """
    if is_done(folder, made_from):
        return folder
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of an attempt that was killed; a run has one driver
        shutil.rmtree(leftover)
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        losses = make(work)
        (work / DONE).write_text(json.dumps({"made_from": made_from, "losses": losses}))
        space.sync_tree(work)  # a resume reads it
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


@contextmanager
def quiet_on_one_thread() -> Iterator[None]:
    """No progress bars for files of half a megabyte; one thread, because sums differ in their last bits with more."""
    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    show_bars: Callable[[], None] = logging.enable_progress_bar
    hide_bars: Callable[[], None] = logging.disable_progress_bar
    torch.set_num_threads(1)
    hide_bars()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            show_bars()


def is_done(folder: Path, made_from: Mapping[str, object]) -> bool:
    marker = folder / DONE
    if not marker.is_file():
        return False
    return bool(json.loads(marker.read_text())["made_from"] == json.loads(json.dumps(made_from)))


def _train(
    folder: Path, demonstrations: Demonstrations, *, steps: int, batch_size: int, lr: float, seed: int
) -> list[float]:
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    order = np.random.default_rng([seed, len(demonstrations)]).permutation(len(demonstrations))
    losses = []
    for step in range(steps):
        places = np.arange(step * batch_size, (step + 1) * batch_size) % len(order)
        tokens, labels = batch(tokenizer, [demonstrations[int(i)] for i in order[places]])
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    save(model, folder)
    return losses


def batch(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[tuple[list[dict[str, object]], str]], *, is_chat: bool = True
) -> tuple[Tensor, Tensor]:
    """Tokens and labels, both [B, T], padded on the right; only the answer and its end token have labels.

    Prompt and answer are tokenized apart, because a model that samples sees them apart too.
    """
    prompts = [_prompt(tokenizer, messages, is_chat) for messages, _ in examples]
    asked = tokenizer(prompts, add_special_tokens=not is_chat)["input_ids"]
    answered = tokenizer([answer for _, answer in examples], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    width = max(len(first) + len(second) + 1 for first, second in zip(asked, answered, strict=True))
    tokens = torch.full((len(examples), width), end if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), IGNORED)
    for i, (first, second) in enumerate(zip(asked, answered, strict=True)):
        row = torch.tensor([*first, *second, end])
        tokens[i, : len(row)] = row
        labels[i, len(first) : len(row)] = row[len(first) :]
    return tokens, labels


def _prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, object]], is_chat: bool) -> str:
    """The prompt as the model sees it: by its chat template, or as plain text."""
    if not is_chat:
        return "".join(str(each["content"]) for each in messages)
    chat = cast(list[dict[str, str]], messages)
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
