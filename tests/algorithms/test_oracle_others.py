"""Rollout correction, distillation, layout and balance against verl's figures; and that no figure is left out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithms.padded import from_padded, to_padded

from tqppo.algorithms import correction, distillation, layout, top_k
from tqppo.algorithms.aggregate import aggregate, normalisers
from tqppo.algorithms.balance import micro_batches, partition, workload
from tqppo.algorithms.losses import PolicyOptions, PolicyTokens
from tqppo.errors import ConfigError

ALIAS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.oracle("tis.")
def test_truncated_importance_weights(case):
    mask, lengths = case.mask(), case.lengths()
    ratio = correction.log_ratios(case.flat("old_log_prob"), case.flat("rollout_log_prob"), mask)
    kind, cap = case.params["rollout_is"], case.params["rollout_is_threshold"]
    case.close(correction.importance_weights(kind, ratio, mask, lengths, cap=cap), "weights")
    case.close(mask.float(), "mask")


@pytest.mark.oracle("distill.fkl_topk.")
def test_forward_kl_over_the_top_k(case):
    logits = torch.from_numpy(case.inputs["student_logits"])[0].requires_grad_()
    teacher = top_k.Teacher(*(torch.from_numpy(case.inputs[f"teacher_topk_{each}"]) for each in ("ids", "log_probs")))
    found = top_k.compare("forward_kl_topk", logits, teacher, logprob_min=case.params["log_prob_min_clamp"])
    found.losses.sum().backward()
    case.close(found.losses, "distillation_losses")
    case.close(logits.grad, "grad_logits_of_sum")
    case.close(found.student_mass, "student_mass")
    case.close(found.teacher_mass, "teacher_mass")
    case.close(found.overlap, "overlap_count")
    case.close(found.overlap_advantage, "overlap_token_advantage")


def _distilled(case, logprobs):
    """Task-free distillation from flat log-probabilities of prompt and response, as verl's `distillation_loss`."""
    responses = torch.from_numpy(case.inputs["response_lens"])
    sequences = torch.from_numpy(case.inputs["prompt_lens"]) + responses
    positions = layout.response_positions(sequences, responses)
    teacher, student = case.flat("teacher_log_probs_flat")[positions], logprobs[positions]
    mask = torch.ones_like(teacher, dtype=torch.bool)
    kind = ALIAS.get(case.params["loss_mode"], case.params["loss_mode"])
    losses = distillation.divergence(kind, student, teacher, mask, loss_max=case.params["loss_max_clamp"])
    if case.params["use_policy_gradient"]:
        old = from_padded(torch.from_numpy(case.inputs["old_log_probs_padded"]), responses)
        tokens = PolicyTokens(student, old, old, mask, responses)
        losses = distillation.as_policy_gradient(losses, tokens, PolicyOptions()).losses
    return aggregate(losses, mask, responses, case.params["loss_agg_mode"], normalisers(mask, responses))


@pytest.mark.oracle("distill.k", "distill.abs.", "distill.mse.", "distill.low_var_kl.")
def test_distillation_on_sampled_tokens(case):
    kind = ALIAS.get(case.params["loss_mode"], case.params["loss_mode"])
    if case.error:
        assert (kind, case.params["use_policy_gradient"]) == ("k1", False)
        with pytest.raises(ConfigError, match="does not depend on the teacher"):
            distillation.check_update(kind, "supervised")
        return
    logprobs = case.flat("student_log_probs_flat").requires_grad_()
    loss = _distilled(case, logprobs)
    loss.backward()
    case.close(loss, "loss")
    case.close(logprobs.grad, "grad_log_probs_flat")


@pytest.mark.oracle("pad.")
def test_layouts(case):
    prompts, responses = (torch.from_numpy(case.inputs[f"{part}_lens"]) for part in ("prompt", "response"))
    values, sequences = case.flat("flat_values"), prompts + responses
    sliced = values[layout.response_positions(sequences, responses)]
    case.close(sliced, "response_from_nested.values")
    # verl pads to the width of its batch; only that width is taken from it.
    width = case.outputs["no_padding_2_padding"].shape[1]
    case.close(to_padded(sliced, responses, width=width), "no_padding_2_padding")
    nested = layout.to_nested(sliced, responses)
    assert nested.offsets().tolist() == case.result("response_from_nested.offsets").tolist()
    attended = torch.from_numpy(case.inputs["attention_mask"]).bool()
    flat_ids = torch.from_numpy(case.inputs["input_ids"])[attended]
    assert flat_ids.tolist() == case.result("input_ids.values").tolist()
    assert layout.to_nested(flat_ids, sequences).offsets().tolist() == case.result("input_ids.offsets").tolist()
    whole = to_padded(torch.ones(len(flat_ids)), sequences)
    assert whole.int().reshape(-1).tolist() == case.result("attention_mask_from_nested").tolist()


@pytest.mark.oracle("balance.")
def test_balance_is_about_as_even(case):
    """On purpose: greedy, where verl searches by differencing, for at most 3 % of a step."""
    costs = [workload(n) for n in case.inputs["seqlens"].tolist()]
    assert costs == case.outputs["workload"].tolist()
    parts = partition(costs, case.params["k"], equal_count=case.params["equal_size"])
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    sums = np.array([sum(costs[i] for i in part) for part in parts])
    assert sums.max() / sums.mean() <= case.outputs["imbalance"] + 0.03  # of a step
    if case.params["equal_size"]:
        assert {len(part) for part in parts} == {len(costs) // case.params["k"]}


@pytest.mark.oracle("dynbsz.")
def test_micro_batches_are_no_more_and_fit_the_budget(case):
    lengths, budget = case.inputs["seqlens"].tolist(), case.params["max_token_len"]
    batches = micro_batches(lengths, budget)
    assert sorted(i for rows in batches for i in rows) == list(range(len(lengths)))
    assert len(batches) <= case.outputs["num_micro_batches"]
    assert max(sum(lengths[i] for i in rows) for rows in batches) <= budget


LEFT_OUT = ("pg.kl_cov.", "pg.clip_cov.")  # losses that depend on the cut into micro-batches, which ours must not


def test_every_figure_is_compared(every_case):
    marked = re.compile(r"@pytest\.mark\.oracle\(([^)]*)\)")
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_oracle_*.py")]
    prefixes = tuple(
        name for source in sources for args in marked.findall(source) for name in re.findall(r'"([^"]+)"', args)
    )
    assert [name for name in every_case if not name.startswith((*prefixes, *LEFT_OUT))] == []
