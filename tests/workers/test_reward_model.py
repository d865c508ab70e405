from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tqppo.algorithms.layout import to_nested
from tqppo.errors import PreflightError
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel
from tqppo.workers.specs import ModelSpec, RoleSpec


def write_classifier(folder: Path, tiny_model: Path, num_labels: int) -> str:
    config = AutoConfig.from_pretrained(tiny_model, num_labels=num_labels)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def test_scores_are_the_classifier_s_at_the_last_token(
    tiny_model: Path, tmp_path: Path, spec: RoleSpec, rows: dict[str, Any]
) -> None:
    path = write_classifier(tmp_path, tiny_model, 1)
    worker = RewardModel(replace(spec, model=ModelSpec(path)))
    worker.start()
    scores = worker.score(rows)["model_score"]
    classifier = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        expected = torch.cat([classifier(tokens[None]).logits[0] for tokens in rows["tokens"].unbind()])
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_padding_scores_zero(tiny_model: Path, tmp_path: Path, spec: RoleSpec, rows: dict[str, Any]) -> None:
    worker = RewardModel(replace(spec, model=ModelSpec(write_classifier(tmp_path, tiny_model, 1))))
    worker.start()
    mask = rows["response_mask"].values().clone()
    mask[: int(rows["response_mask"].offsets()[1])] = False
    rows["response_mask"] = to_nested(mask, rows["response_mask"].offsets().diff())
    scores = worker.score(rows)["model_score"]
    assert scores[0] == 0
    assert scores[1:].abs().min() > 0


def test_a_classifier_with_several_labels_is_refused(tiny_model: Path, tmp_path: Path, spec: RoleSpec) -> None:
    worker = RewardModel(replace(spec, model=ModelSpec(write_classifier(tmp_path, tiny_model, 3))))
    with pytest.raises(PreflightError, match="has 3 labels"):
        worker.start()


def test_reference_gives_the_untrained_actor_s_logprobs(make_actor: Any, spec: RoleSpec, rows: dict[str, Any]) -> None:
    reference = Reference(spec)
    reference.start()
    found, expected = reference.logprobs(rows)["ref_logprobs"], make_actor().old_logprobs(rows)["old_logprobs"]
    assert torch.equal(found.values(), expected.values())
    assert not any(p.requires_grad for p in reference.model.parameters())
