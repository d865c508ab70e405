"""TRL's GRPOTrainer, a few steps at a time: `train.py` starts this as a process of its own and says when to go on.

It reads a number of steps per line and answers each with what it did. Its settings come as JSON in the first line.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tqppo.rewards import functions

TUNED = {"bf16": False, "gradient_checkpointing": False}
KINDS: dict[str, dict[str, Any]] = {"trl": TUNED, "static": {**TUNED, "cache_implementation": "static"}, "defaults": {}}


@dataclass
class Done:
    """What was sampled since the last answer."""

    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    flat_groups: int = 0  # whose sessions all earned the same

    def add(self, rewards: list[float], completions: list[list[int]], group: int) -> None:
        self.samples += len(rewards)
        self.tokens += sum(map(len, completions))
        self.reward += sum(rewards)
        groups = [rewards[i : i + group] for i in range(0, len(rewards), group)]
        self.flat_groups += sum(len(set(each)) == 1 for each in groups)


class Turns(TrainerCallback):
    """Holds the trainer between optimizer steps until it is told to go on."""

    def __init__(self, answers: TextIO, done: Done, updates: int) -> None:
        self.answers, self.done, self.updates, self.left = answers, done, updates, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._next()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self._next()

    def _next(self) -> None:
        self.answers.write(json.dumps(vars(self.done)) + "\n")
        self.answers.flush()
        vars(self.done).update(vars(Done()))
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        self.left = int(line) * self.updates


def config_of(settings: dict[str, Any]) -> GRPOConfig:
    """One generation of all prompts, then `updates` optimizer steps over it, as in our step."""
    rows = settings["prompts"] * settings["group"]
    return GRPOConfig(
        output_dir=settings["scratch"],
        use_cpu=True,
        per_device_train_batch_size=rows // settings["updates"],
        steps_per_generation=settings["updates"],
        gradient_accumulation_steps=1,
        num_generations=settings["group"],
        max_completion_length=settings["max_new_tokens"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        epsilon=settings["clip"],
        beta=0.0,
        temperature=1.0,
        top_k=0,
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **KINDS[settings["kind"]],
    )


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    graded = getattr(functions, settings["reward"])
    done = Done()

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        rewards = [float(graded("", text, wanted)["score"]) for text, wanted in pairs]
        done.add(rewards, completion_ids, settings["group"])
        return rewards

    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=config_of(settings),
        train_dataset=Dataset.from_list(settings["dataset"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Turns(answers, done, settings["updates"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
