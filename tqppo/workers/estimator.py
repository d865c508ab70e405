"""The estimator: one process that turns rewards, log-probabilities and values into advantages. A Ray actor.

It reads small columns only, and puts back what the updates need.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tqppo.algorithms import correction, kl
from tqppo.algorithms.advantages import Estimate, EstimateOptions, estimate
from tqppo.algorithms.aggregate import session_weights
from tqppo.algorithms.data_metrics import data_metrics
from tqppo.algorithms.groups import Rows
from tqppo.algorithms.layout import row_counts
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """Plain values of the config's `algorithm`, and the limits that clip ratios are measured against."""

    advantage: str
    options: EstimateOptions
    max_prompt_tokens: int
    max_response_tokens: int
    old_logprobs: str = "old_logprobs"  # the column that holds them
    kl_reward: str = "none"
    correction: str = "none"
    correction_cap: float = 2.0
    correction_floor: float = 0.5
    reject: str = "none"
    reject_threshold: float = 2.0
    model_score_weight: float = 1.0
    session_mean: bool = False
    tokenizer: str = ""  # for writing trajectories as text
    trust_remote_code: bool = False


class Estimator:
    def __init__(self, spec: EstimatorSpec, queue: Queue) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.queue = queue
        self.tokenizer: Any = None

    def estimate(self, batch: BatchMeta, kl_coef: float) -> tuple[list[str], Metrics]:
        """Adds advantages, and what the config asks for of returns, loss_mask, correction_weights, session_weight."""
        columns = self.queue.get(batch, self._wanted(batch))
        rows = describe_rows(batch.tags)
        flat = {name: value.values() for name, value in columns.items() if value.is_nested}
        reward = columns["reward"]
        if "model_score" in columns:
            reward = reward + self.spec.model_score_weight * columns["model_score"]
        mask = flat["response_mask"]
        metrics: Metrics = {}
        put: dict[str, Any] = {}
        if {"rollout_logprobs", "old_logprobs"} <= flat.keys():
            mask, more, weights = self._correct(flat, mask, rows)
            metrics |= more
            put |= weights
        penalty = None
        if self.spec.kl_reward != "none":
            tokens = kl.estimate(self.spec.kl_reward, flat[self.spec.old_logprobs], flat["ref_logprobs"], mask)
            metrics["actor/reward_kl_penalty"] = kl.mean_over_rows(tokens, mask, rows.lengths)
            penalty = kl_coef * tokens
        critic = flat.get("values") if self.spec.advantage == "gae" else columns.get("baseline_reward")
        result = estimate(self.spec.advantage, reward, mask, rows, self.spec.options, penalty=penalty, critic=critic)
        put["advantages"] = Jagged(result.advantages, rows.lengths)
        if self.spec.advantage == "gae":
            put["returns"] = Jagged(result.returns, rows.lengths)
        if self.spec.session_mean:
            counts = row_counts(mask, rows.lengths) > 0
            put["session_weight"] = session_weights(rows.session, counts).float()
        metrics |= result.metrics
        metrics |= self._data_metrics(batch, reward, mask, rows, result, flat.get("values"), penalty)
        self.queue.put(batch, put)
        return list(put), metrics

    def dump(self, batch: BatchMeta, path: str) -> None:
        """The batch's trajectories as JSON lines: text, reward, advantage, log-probabilities."""
        tokenizer = self._tokenizer()
        columns = self.queue.get(batch, ["tokens", "rollout_logprobs", "advantages"])
        unbound = zip(batch.tags, *(columns[name].unbind() for name in columns), strict=True)
        lines = []
        for tags, tokens, logprobs, advantages in unbound:
            if tags.get("is_padding"):
                continue
            prompt = tags["prompt_len"]
            text = {
                "prompt": tokenizer.decode(tokens[:prompt].tolist()),
                "response": tokenizer.decode(tokens[prompt:].tolist()),
            }
            numbers = {
                "advantage": float(advantages.sum() / max(1, int((advantages != 0).sum()))),
                "logprobs": [round(value, 5) for value in logprobs.tolist()],
            }
            lines.append(json.dumps({**tags, **text, **numbers}, ensure_ascii=False))
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(f"{line}\n" for line in lines))

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(
                self.spec.tokenizer, trust_remote_code=self.spec.trust_remote_code
            )
        return self.tokenizer

    def _wanted(self, batch: BatchMeta) -> list[str]:
        possible = ["response_mask", "reward", "model_score", "rollout_logprobs", "old_logprobs"]
        possible += ["ref_logprobs"] if self.spec.kl_reward != "none" else []
        possible += ["values", "baseline_reward"]
        return [name for name in possible if name in batch.columns]

    def _correct(self, flat: dict[str, Tensor], mask: Tensor, rows: Rows) -> tuple[Tensor, Metrics, dict[str, Jagged]]:
        """Engine against trainer: the difference as metrics, weights and a narrower mask where they were asked for."""
        spec = self.spec
        old, engine = flat["old_logprobs"], flat["rollout_logprobs"]
        metrics = correction.diagnostics(old, engine, mask, rows.lengths)
        log_ratio = correction.log_ratios(old, engine, mask)
        kept, put = mask, {}
        if spec.reject != "none":
            kept = correction.reject(spec.reject, log_ratio, mask, rows.lengths, threshold=spec.reject_threshold)
            put["loss_mask"] = Jagged(kept, rows.lengths)
        if spec.correction != "none":
            weights = correction.importance_weights(
                spec.correction, log_ratio, kept, rows.lengths, cap=spec.correction_cap, floor=spec.correction_floor
            )
            put["correction_weights"] = Jagged(weights, rows.lengths)
            metrics |= correction.weight_metrics(weights, mask, kept)
        return kept, metrics, put

    def _data_metrics(
        self,
        batch: BatchMeta,
        reward: Tensor,
        mask: Tensor,
        rows: Rows,
        result: Estimate,
        values: Tensor | None,
        penalty: Tensor | None,
    ) -> Metrics:
        return data_metrics(
            reward=reward,
            mask=mask,
            rows=rows,
            advantages=result.advantages,
            returns=result.returns,
            values=values,
            penalty=penalty,
            prompt_lengths=torch.tensor([tags["prompt_len"] for tags in batch.tags]),
            max_prompt=self.spec.max_prompt_tokens,
            max_response=self.spec.max_response_tokens,
        )


def describe_rows(tags: Sequence[Any]) -> Rows:
    """Who belongs to whom, from the tags: prompts and sessions numbered in the order of their first row."""
    groups: dict[str, int] = {}
    sessions: dict[tuple[str, int], int] = {}
    last: dict[int, tuple[int, int]] = {}  # session → (highest trajectory, its row)
    group, session = [], []
    for row, tag in enumerate(tags):
        group.append(groups.setdefault(tag["uid"], len(groups)))
        number = sessions.setdefault((tag["uid"], tag["session"]), len(sessions))
        session.append(number)
        last[number] = max(last.get(number, (-1, -1)), (tag["trajectory"], row))
    is_final = torch.zeros(len(tags), dtype=torch.bool)
    is_final[[row for _, row in last.values()]] = True
    return Rows(
        group=torch.tensor(group),
        session=torch.tensor(session),
        is_final=is_final,
        is_padding=torch.tensor([bool(tag.get("is_padding")) for tag in tags]),
        lengths=torch.tensor([tag["response_len"] for tag in tags]),
    )
