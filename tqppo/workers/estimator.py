"""The estimator: one process that turns rewards, log-probabilities and values into advantages.

It reads small columns only, and puts back what the updates need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tqppo import dataflow, space
from tqppo.algorithms import correction, kl
from tqppo.algorithms.advantages import Estimate, EstimateInputs, EstimateOptions, estimate
from tqppo.algorithms.aggregate import session_weights
from tqppo.algorithms.credit import Turns
from tqppo.algorithms.data_metrics import data_metrics
from tqppo.algorithms.groups import RowGroups
from tqppo.algorithms.layout import row_counts
from tqppo.dataflow import Features
from tqppo.devices.seats import NO_CPU, Seat
from tqppo.errors import DataError
from tqppo.processes.garbage import spare_what_started
from tqppo.processes.hosting import Hosting, Launcher, results
from tqppo.protocols import Metrics
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta, Jagged
from tqppo.rewards.scorer import LARGEST, unusable


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """Plain values of the config's `algorithm`, and the limits that clip ratios are measured against."""

    advantage: str
    options: EstimateOptions
    max_prompt_tokens: int
    max_response_tokens: int
    features: Features = field(default_factory=Features)
    kl_reward: str = "k1"  # estimator of the KL in the reward, with `Features.kl_in_reward`
    correction: str = "none"
    correction_cap: float = 2.0
    correction_floor: float = 0.5
    reject: str = "none"
    reject_threshold: float = 2.0
    model_score_weight: float = 1.0
    tokenizer: str = ""  # for writing trajectories as text
    trust_remote_code: bool = False


class Estimator:
    def __init__(self, spec: EstimatorSpec, queue: Queue) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.queue = queue
        self.tokenizer: Any = None

    def ready(self) -> None:
        """Return once the process has started."""
        spare_what_started()

    def estimate(self, batch: BatchMeta, kl_coef: float) -> tuple[tuple[str, ...], Metrics]:
        """Put advantages on the rows, where there is a policy loss, and the other columns that the config asks for.

        Returns the names of the columns."""
        columns = self.queue.get(batch, dataflow.ESTIMATE.reads(self.spec.features))
        check_rewards(batch, columns)
        rows = describe_rows(batch.tags)
        flat = {name: value.values() for name, value in columns.items() if value.is_nested}
        mask, metrics, put = self._corrected(flat, rows)
        if self.spec.features.has_session_weights:
            counts = row_counts(mask, rows.lengths) > 0
            put["session_weight"] = session_weights(rows.session, counts).float()
        if self.spec.features.has_policy_loss:
            penalty = self._penalty(flat, mask, rows, kl_coef, metrics)
            inputs = self._inputs(columns, flat, mask, rows, penalty)
            result = estimate(self.spec.advantage, inputs, self.spec.options)
            put |= self._results(inputs, result)
            metrics |= result.metrics | self._describe(batch, inputs, result)
        written = dataflow.ESTIMATE.writes(self.spec.features)
        assert set(put) == set(written), f"the estimator made {set(put)} and declares {written}"
        self.queue.put(batch, put)
        return written, metrics

    def _describe(self, batch: BatchMeta, inputs: EstimateInputs, result: Estimate) -> Metrics:
        return data_metrics(
            inputs,
            result,
            torch.tensor([tags["prompt_len"] for tags in batch.tags]),
            max_prompt=self.spec.max_prompt_tokens,
            max_response=self.spec.max_response_tokens,
        )

    def _penalty(
        self, flat: dict[str, Tensor], mask: Tensor, rows: RowGroups, kl_coef: float, metrics: Metrics
    ) -> Tensor | None:
        """β·KL per token [N], where the reward has a KL; its mean is added to `metrics`."""
        features = self.spec.features
        if not features.kl_in_reward:
            return None
        tokens = kl.estimate(self.spec.kl_reward, flat[features.old_logprobs], flat["ref_logprobs"], mask)
        metrics["actor/reward_kl_penalty"] = kl.mean_over_rows(tokens, mask, rows.lengths)
        return kl_coef * tokens

    def _inputs(
        self,
        columns: dict[str, Tensor],
        flat: dict[str, Tensor],
        mask: Tensor,
        rows: RowGroups,
        penalty: Tensor | None,
    ) -> EstimateInputs:
        reward, terms = columns["reward"], [(1.0, columns["reward"])]
        if self.spec.features.has_reward_model:
            terms.append((self.spec.model_score_weight, columns["model_score"]))
            reward = reward + self.spec.model_score_weight * columns["model_score"]
        return EstimateInputs(
            reward,
            mask,
            rows,
            penalty=penalty,
            reward_terms=terms,
            values=flat.get("values"),
            baseline_reward=columns.get("baseline_reward"),
            old_logprobs=flat.get("old_logprobs"),
            sum_pi_squared=flat.get("sum_pi_squared"),
            turns=_turns(columns) if self.spec.features.credits_turns else None,
        )

    def _results(self, inputs: EstimateInputs, result: Estimate) -> dict[str, Jagged | Tensor]:
        """Advantages, and with a critic the returns."""
        lengths = inputs.rows.lengths
        put: dict[str, Jagged | Tensor] = {"advantages": Jagged(result.advantages, lengths)}
        if self.spec.features.uses_values:
            put["returns"] = Jagged(result.returns, lengths)
        return put

    def write_trajectories(self, batch: BatchMeta, path: Path) -> None:
        """Write the batch's trajectories as JSON lines: text, reward, log-probabilities, and the advantage if any."""
        tokenizer = self._tokenizer()
        names = ["tokens", "rollout_logprobs", *(["advantages"] if self.spec.features.has_policy_loss else [])]
        columns = self.queue.get(batch, names)
        unbound = zip(batch.tags, *(columns[name].unbind() for name in names), strict=True)
        lines = []
        for tags, tokens, logprobs, *advantages in unbound:
            if tags.get("is_padding"):
                continue
            prompt = tags["prompt_len"]
            text = {
                "prompt": tokenizer.decode(tokens[:prompt].tolist()),
                "response": tokenizer.decode(tokens[prompt:].tolist()),
            }
            numbers: dict[str, object] = {"logprobs": [round(value, 5) for value in logprobs.tolist()]}
            for each in advantages:
                numbers["advantage"] = float(each.sum() / max(1, int((each != 0).sum())))
            lines.append(json.dumps({**tags, **text, **numbers}, ensure_ascii=False))
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        with space.explained(path.parent, len(data)):
            path.parent.mkdir(parents=True, exist_ok=True)
        space.write_whole(path, data)

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(
                self.spec.tokenizer, trust_remote_code=self.spec.trust_remote_code
            )
        return self.tokenizer

    def _corrected(
        self, flat: dict[str, Tensor], rows: RowGroups
    ) -> tuple[Tensor, Metrics, dict[str, Jagged | Tensor]]:
        """Compare engine and trainer: metrics, and by the config's choice a narrower mask and importance weights."""
        spec, mask = self.spec, flat["response_mask"]
        put: dict[str, Jagged | Tensor] = {}
        if not spec.features.compares_engine:
            return mask, {}, put
        old, engine = flat["old_logprobs"], flat["rollout_logprobs"]
        metrics = correction.diagnostics(old, engine, mask, rows.lengths)
        log_ratio = correction.log_ratios(old, engine, mask)
        kept = mask
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


def _turns(columns: dict[str, Tensor]) -> Turns:
    ends, rewards, anchors = (columns[name] for name in ("turn_ends", "turn_rewards", "turn_anchors"))
    counts: Tensor = ends.offsets().diff()  # type: ignore[attr-defined]
    return Turns(counts, ends.values(), rewards.values(), anchors.values())


def check_rewards(batch: BatchMeta, columns: Mapping[str, Tensor]) -> None:
    """Raise DataError that names the rows whose rewards or scores would make the losses of the whole batch useless."""
    for name in ("reward", "model_score", "baseline_reward"):
        values = columns.get(name)
        if values is None:
            continue
        bad = [row for row, value in enumerate(values.flatten().tolist()) if unusable(value) is not None]
        if bad:
            shown = ", ".join(f"{batch.keys[row]} has {float(values[row]):g}" for row in bad[:8])
            raise DataError(f"{name} of {len(bad)} rows is not finite, or beyond ±{LARGEST:g}: {shown}")


def describe_rows(tags: Sequence[Any]) -> RowGroups:
    """The group and session of each row, from the tags; both are numbered in the order of their first row."""
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
    return RowGroups(
        group=torch.tensor(group),
        session=torch.tensor(session),
        is_final=is_final,
        is_padding=torch.tensor([bool(tag.get("is_padding")) for tag in tags]),
        lengths=torch.tensor([tag["response_len"] for tag in tags]),
    )


class RemoteEstimator:
    """The estimator in a process of its own. Calls end at a deadline."""

    def __init__(
        self, spec: EstimatorSpec, queue: Queue, *, timeout_s: float, launcher: Launcher, seat: Seat = NO_CPU
    ) -> None:
        self._process = launcher.launch(Hosting(seat), Estimator, spec, queue.handle())
        self._timeout_s = timeout_s
        self._watch = launcher.watch({"the estimator's process": self._process})

    def ready(self, timeout_s: float) -> None:
        results([self._process.call(Estimator.ready)], timeout_s, "starting the estimator", watch=self._watch)

    def estimate(self, batch: BatchMeta, kl_coef: float) -> tuple[tuple[str, ...], Metrics]:
        call = self._process.call(Estimator.estimate, batch, kl_coef)
        return results([call], self._timeout_s, "the estimator", watch=self._watch)[0]

    def write_trajectories(self, batch: BatchMeta, path: Path) -> None:
        call = self._process.call(Estimator.write_trajectories, batch, path)
        results([call], self._timeout_s, "writing trajectories", watch=self._watch)
