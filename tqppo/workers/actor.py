"""The policy that learns: log-probabilities, updates, and weights for the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tqppo import dataflow
from tqppo.algorithms import correction, kl
from tqppo.algorithms.aggregate import Normalisers, aggregate
from tqppo.algorithms.losses import LEARNS_WITHOUT_ADVANTAGE, POLICY_LOSSES, PolicyTokens
from tqppo.processes.nodes import this_node
from tqppo.protocols import Metrics, WeightSource
from tqppo.weights import publish as weights
from tqppo.workers.compute.learner import Learner, Selection, Tokens
from tqppo.workers.compute.logprobs import Scoring
from tqppo.workers.compute.microbatch import FlatRows, MicroBatch
from tqppo.workers.compute.model import PolicyModel, RoleModel, adapters_off, add_lora, load_policy
from tqppo.workers.compute.tally import Figures, Loss, ReportNames
from tqppo.workers.process.bridge import Columns, implements


class Actor(Learner):
    prefix = "actor"

    @property
    def report(self) -> ReportNames:
        clipped = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
        with_kl = ("actor/kl_loss",) if self.features.kl_in_loss else ()
        with_bonus = ("actor/entropy_loss",) if self.spec.policy_loss.entropy_coef > 0 else ()
        shares = ("actor/loss", "actor/pg_loss", *clipped, *with_kl, *with_bonus, "actor/entropy")
        if not self.features.old_is_current:
            return ReportNames(shares)
        return ReportNames(shares, correction.GAP_MEANS, correction.GAP_MAXIMA)

    def start(self) -> None:
        spec = self.spec
        self.publisher = weights.Publisher(
            spec.publish_dir,
            spec.model.path,
            with_checksums=spec.with_checksums,
            num_versions=spec.num_versions,
        )
        super().start()

    def close(self) -> None:
        self.publisher.close()
        super().close()

    def _load(self) -> RoleModel:
        model = load_policy(self.spec.model, self.device)
        if self.spec.model.lora_rank:
            add_lora(model, self.spec.model, seed=self.spec.seed)
        return model

    @implements(dataflow.OLD_LOGPROBS)
    def old_logprobs(self, rows: Columns) -> dict[str, Tensor]:
        """Log-probabilities of the sampled tokens under the current policy, at the sampling temperature."""
        names = dataflow.OLD_LOGPROBS.writes(self.features)
        measure = Scoring(self.spec.temperature, with_sum_squares=self.features.has_token_baseline)
        results = self.per_token(rows, lambda micro: self.model(micro, measure))
        return dict(zip(names, results, strict=True))

    @implements(dataflow.REFERENCE_LOGPROBS)
    def reference_logprobs(self, rows: Columns) -> dict[str, Tensor]:
        """Log-probabilities under the model without its LoRA adapter, which is then the reference."""
        with adapters_off(self.model):
            (result,) = self.per_token(rows, lambda micro: self._forward(micro, False))
        return {"ref_logprobs": result}

    @implements(dataflow.ACTOR_UPDATE)
    def update(self, rows: Columns, *, step: int, sizes: Sequence[int] = ()) -> Metrics:
        """Take one optimizer step per mini-batch and epoch, at the learning rate of training step `step` (from 1).

        `sizes` are the rows of each mini-batch on this rank; without them all rows are one mini-batch.
        """
        return self.train(rows, step=step, sizes=sizes)

    def _forward(self, micro: MicroBatch, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, _ = self.model(micro, Scoring(self.spec.temperature, with_entropy))
        return logprobs, entropy

    def _idle_loss(self, micro: MicroBatch) -> Tensor:
        return self._forward(micro, False)[0].sum() * 0.0

    def _selection(self, rows: FlatRows) -> Selection:
        loss = self.spec.policy_loss
        keep = rows.response["loss_mask" if self.features.has_loss_mask else "response_mask"]
        counts = rows.count(keep)
        active = counts > 0
        if not self.features.kl_in_loss and loss.entropy_coef == 0 and loss.name not in LEARNS_WITHOUT_ADVANTAGE:
            active = rows.count(keep & (rows.response["advantages"] != 0)) > 0  # 0 · anything has no gradient
        ones = torch.ones(len(rows))
        return Selection(keep, (counts,), active, rows.row.get("session_weight", ones))

    def _loss(self, rows: FlatRows, micro: MicroBatch, whole: Sequence[Normalisers]) -> Loss:
        logprobs, entropy = self._forward(micro, True)
        assert entropy is not None, "asked for"
        return self._policy_loss(logprobs, entropy, self.tokens(rows, micro), whole[0])

    def _policy_loss(self, logprobs: Tensor, entropy: Tensor, tokens: Tokens, whole: Normalisers) -> Loss:
        """The policy term, with the KL to the reference and the entropy bonus."""
        spec = self.spec.policy_loss
        policy = POLICY_LOSSES[spec.name](
            self._policy_tokens(logprobs, tokens.column("advantages"), tokens), spec.options
        )
        total = self._aggregate(policy.losses, tokens, whole)
        parts = {"actor/pg_loss": total}
        if self.features.kl_in_loss:
            losses = kl.estimate(spec.kl, logprobs, tokens.column("ref_logprobs"), tokens.mask)
            parts["actor/kl_loss"] = self._aggregate(losses, tokens, whole)
            total = total + spec.kl_coef * parts["actor/kl_loss"]
        if spec.entropy_coef > 0:
            parts["actor/entropy_loss"] = self._aggregate(entropy, tokens, whole)
            total = total - spec.entropy_coef * parts["actor/entropy_loss"]
        sums = {**policy.sums, "actor/entropy": entropy.detach().sum()}
        return Loss(total, {"actor/loss": total, **parts}, sums, self._gaps(logprobs, tokens))

    def _gaps(self, logprobs: Tensor, tokens: Tokens) -> Figures:
        """How far the engine is from the trainer, where no stage before the update measures it."""
        if not self.features.old_is_current:
            return Figures()
        gaps = correction.token_gaps(logprobs, tokens.column("rollout_logprobs"))
        count = tokens.mask.sum()  # the mask is true throughout
        return Figures(
            {name: (gaps[name].sum(), count) for name in correction.GAP_MEANS},
            {name: gaps[name].max() for name in correction.GAP_MAXIMA},
        )

    def _policy_tokens(self, logprobs: Tensor, advantages: Tensor, tokens: Tokens) -> PolicyTokens:
        return PolicyTokens(
            logprobs,
            logprobs.detach() if self.features.old_is_current else tokens.column(self.features.old_logprobs),
            advantages,
            tokens.mask,
            tokens.lengths,
            tokens.column("correction_weights") if self.features.has_correction_weights else None,
        )

    def _aggregate(self, losses: Tensor, tokens: Tokens, whole: Normalisers) -> Tensor:
        spec = self.spec.policy_loss
        return aggregate(
            losses,
            tokens.mask,
            tokens.lengths,
            spec.aggregate,
            whole,
            horizon=spec.horizon,
            session_weights=tokens.session_weights,
        )

    def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each next token of one sequence, untempered. The engines must return the same."""
        sequence = torch.tensor(tokens)
        rows = {
            "tokens": torch.nested.nested_tensor([sequence], layout=torch.jagged),
            "response_mask": torch.nested.nested_tensor(
                [torch.ones(len(tokens) - 1, dtype=torch.bool)], layout=torch.jagged
            ),
        }
        (result,) = self.per_token(rows, lambda micro: (self.model(micro, Scoring(1.0))[0],))
        return result.values().tolist()

    def publish(self, version: int) -> WeightSource:
        """The weights as a Hugging Face folder in shared memory, for engines on this node to map or reload."""
        is_writer = self.ranks.rank == 0
        source = self.publisher.publish(self._policy().causal_lm, self.dtype, version, is_writer=is_writer)
        return replace(source, node=this_node())

    def export(self, folder: str) -> None:
        """A Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads; adapters merged."""
        path = Path(folder)
        is_writer = self.ranks.rank == 0
        entries = weights.entries(self._policy().causal_lm, self.dtype, is_writer=is_writer)
        if is_writer:
            path.mkdir(parents=True, exist_ok=True)
            weights.save_description(self._policy().causal_lm, self.spec.model.path, path, self.dtype)
        weights.export(path if is_writer else None, entries)

    def _policy(self) -> PolicyModel:
        return cast(PolicyModel, cast(Any, self.model))
