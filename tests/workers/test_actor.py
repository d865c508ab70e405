from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tqppo.algorithms import correction
from tqppo.algorithms.layout import to_nested
from tqppo.algorithms.losses import POLICY_LOSSES
from tqppo.dataflow import Features
from tqppo.errors import CheckpointError, PreflightError
from tqppo.tiny.model import write_tiny_model
from tqppo.workers.actor import Actor
from tqppo.workers.compute.microbatch import FlatRows
from tqppo.workers.specs import ModelSpec, OptimizerSpec, PolicyLossSpec, RoleSpec

MakeActor = Callable[..., Actor]
Columns = dict[str, Any]


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}


def assert_close(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(torch.as_tensor(one[name]), torch.as_tensor(other[name]), atol=tolerance, rtol=1e-4)


def like(column: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Other values, laid out as the column is."""
    return to_nested(values, column.offsets().diff())


def with_padding(rows: Columns, places: list[int]) -> Columns:
    """The rows with padding rows (one prompt token, one response token that does not count) before these places."""
    padded: Columns = {}
    for name, column in rows.items():
        if not column.is_nested:
            items = list(column)
            neutral = torch.zeros(())
        else:
            items = list(column.unbind())
            neutral = torch.zeros(2 if name == "tokens" else 1, dtype=column.dtype)
        for place in sorted(places, reverse=True):
            items.insert(place, neutral)
        lengths = torch.tensor([len(item) for item in items]) if column.is_nested else None
        padded[name] = torch.stack(items) if lengths is None else to_nested(torch.cat(items), lengths)
    return padded


LOSSES = [
    {"policy_loss": PolicyLossSpec()},
    {
        "policy_loss": PolicyLossSpec(aggregate="seq-mean-token-sum", kl="k3", kl_coef=0.1, entropy_coef=0.01),
        "features": Features(kl_in_loss=True),
    },
    {"policy_loss": PolicyLossSpec(name="gspo", aggregate="seq-mean-token-mean")},
    {"policy_loss": PolicyLossSpec(name="cispo"), "features": Features(has_correction_weights=True)},
    {"policy_loss": PolicyLossSpec(name="gpg", aggregate="seq-mean-token-sum-norm", horizon=64)},
    {"policy_loss": PolicyLossSpec(name="geo_mean", aggregate="seq-mean-token-mean")},
    {
        "policy_loss": PolicyLossSpec(name="sapo", aggregate="session-mean", kl="k2", kl_coef=0.1),
        "features": Features(kl_in_loss=True, has_session_weights=True),
    },
    {"policy_loss": PolicyLossSpec(name="dppo_tv"), "features": Features(has_correction_weights=True)},
    {"policy_loss": PolicyLossSpec(name="dppo_kl", aggregate="seq-mean-token-mean")},
    {"policy_loss": PolicyLossSpec(name="dro")},
]
ids = [f"{each['policy_loss'].name}-{each['policy_loss'].aggregate}" for each in LOSSES]


def test_every_policy_loss_is_covered() -> None:
    assert {each["policy_loss"].name for each in LOSSES} == set(POLICY_LOSSES)


@pytest.mark.parametrize("loss", LOSSES, ids=ids)
def test_an_update_does_not_depend_on_the_micro_batches(make_actor: MakeActor, rows: Columns, loss: Any) -> None:
    whole, cut = (make_actor(**loss, micro_batch_tokens=budget) for budget in (100_000, 48))
    assert len(cut.micro_batches(_flat(rows), torch.arange(8))) > len(whole.micro_batches(_flat(rows), torch.arange(8)))
    metrics = [actor.update(rows, step=1, sizes=[4, 4]) for actor in (whole, cut)]
    assert_close(*metrics)
    assert_close(weights(whole), weights(cut))
    assert_close(whole.optimizer.state(), cut.optimizer.state(), tolerance=1e-6)  # Adam hides a gradient's scale


def _flat(rows: Columns) -> Any:
    return FlatRows.of(rows)


@pytest.mark.parametrize("loss", LOSSES, ids=ids)
def test_one_update_needs_no_forward_of_its_own_for_the_old_policy(
    make_actor: MakeActor, rows: Columns, loss: Any
) -> None:
    features = replace(loss.get("features", Features()), takes_one_step=True)
    if features.has_correction_weights:  # then a stage before the update computes them
        assert not features.old_is_current
        return
    old = make_actor(**loss).old_logprobs(rows)
    mine, theirs = make_actor(**{**loss, "features": features}), make_actor(**loss)
    engine = {"rollout_logprobs": like(old["old_logprobs"], old["old_logprobs"].values() - 0.25)}
    rows.pop("old_logprobs")
    found, expected = mine.update({**rows, **engine}, step=1), theirs.update({**rows, **old}, step=1)
    gaps = {name: found.pop(name) for name in (*correction.GAP_MEANS, *correction.GAP_MAXIMA)}
    assert_close(found, expected)
    assert_close(mine.optimizer.state(), theirs.optimizer.state(), tolerance=1e-6)
    assert gaps["rollout_corr/log_ratio_max"] == pytest.approx(0.25, abs=1e-5)
    assert gaps["rollout_corr/kl"] == pytest.approx(-0.25, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES, ids=ids)
def test_padding_rows_contribute_nothing(make_actor: MakeActor, rows: Columns, loss: Any) -> None:
    plain, padded = make_actor(**loss), make_actor(**loss)
    metrics = [
        plain.update(rows, step=1, sizes=[4, 4]),
        padded.update(with_padding(rows, [2, 6, 8]), step=1, sizes=[5, 6]),
    ]
    assert_close(*metrics, tolerance=1e-6)
    assert_close(weights(plain), weights(padded), tolerance=1e-6)
    assert_close(plain.optimizer.state(), padded.optimizer.state(), tolerance=1e-6)


def test_an_all_padding_mini_batch_takes_no_step(make_actor: MakeActor, rows: Columns) -> None:
    plain, padded = make_actor(), make_actor()
    plain.update(rows, step=1)
    metrics = padded.update(with_padding(rows, [8, 8]), step=1, sizes=[8, 2])
    assert metrics["actor/updates"] == 1
    assert metrics["padding/all_padding"] == 1
    assert_close(weights(plain), weights(padded), tolerance=1e-6)


def test_nothing_but_padding_reports_no_loss_and_changes_nothing(make_actor: MakeActor, rows: Columns) -> None:
    actor = make_actor()
    before = weights(actor)
    only_padding = {**rows, "response_mask": like(rows["response_mask"], torch.zeros(76, dtype=torch.bool))}
    metrics = actor.update(only_padding, step=1)
    assert "actor/pg_loss" not in metrics
    assert "actor/grad_norm" not in metrics
    assert metrics["actor/updates"] == 0
    assert all(torch.equal(before[name], p) for name, p in actor.model.named_parameters())


def test_rows_without_advantage_need_no_forward_but_still_count(make_actor: MakeActor, rows: Columns) -> None:
    advantages = rows["advantages"].values().clone()
    offsets = rows["advantages"].offsets()
    for row in (1, 3, 6):
        advantages[offsets[row] : offsets[row + 1]] = 0
    rows["advantages"] = to_nested(advantages, offsets.diff())
    skipping, trying = make_actor(), make_actor()
    selection = trying._selection(_flat(rows))
    assert selection.active.tolist() == [True, False, True, False, True, True, False, True]
    trying._selection = lambda flat: replace(selection, active=torch.ones(8, dtype=torch.bool))  # type: ignore[method-assign]
    metrics = [actor.update(rows, step=1, sizes=[4, 4]) for actor in (skipping, trying)]
    assert metrics[0]["actor/pg_loss"] == pytest.approx(metrics[1]["actor/pg_loss"], abs=1e-6)
    assert metrics[0]["actor/grad_norm"] == pytest.approx(metrics[1]["actor/grad_norm"], rel=1e-4)
    assert_close(weights(skipping), weights(trying))


def test_a_batch_without_any_advantage_takes_no_step(make_actor: MakeActor, rows: Columns) -> None:
    actor = make_actor()
    actor.update(rows, step=1)
    before = weights(actor)
    rows["advantages"] = like(rows["advantages"], torch.zeros(76))
    metrics = actor.update(rows, step=2, sizes=[4, 4])
    assert metrics["actor/updates"] == 0
    assert metrics["actor/updates_without_signal"] == 2
    assert all(torch.equal(before[name], p) for name, p in actor.model.named_parameters())


def test_epochs_are_further_passes(make_actor: MakeActor, rows: Columns, spec: RoleSpec) -> None:
    once, twice = make_actor(), make_actor(optimizer=replace(spec.optimizer, epochs=2))
    once.update(rows, step=1, sizes=[4, 4])
    once.update(rows, step=1, sizes=[4, 4])
    assert twice.update(rows, step=1, sizes=[4, 4])["actor/updates"] == 4
    assert all(torch.equal(weights(once)[name], p) for name, p in weights(twice).items())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(make_actor: MakeActor, rows: Columns) -> None:
    actor = make_actor()
    before = weights(actor)
    advantages = rows["advantages"].values().clone()
    advantages[0] = torch.nan
    rows["advantages"] = like(rows["advantages"], advantages)
    rows["response_mask"] = like(rows["response_mask"], torch.ones(76, dtype=torch.bool))
    metrics = actor.update(rows, step=1)
    assert metrics["actor/skipped_updates"] == 1
    assert metrics["actor/updates"] == 0
    assert all(torch.equal(before[name], p) for name, p in actor.model.named_parameters())


def test_learning_rate_follows_the_training_step(make_actor: MakeActor, rows: Columns) -> None:
    actor = make_actor(optimizer=OptimizerSpec(lr=1.0, total_steps=4, schedule="linear"))
    assert actor.update(rows, step=3)["actor/lr"] == 0.5


def test_the_engine_s_logprobs_can_be_the_old_ones(make_actor: MakeActor, rows: Columns) -> None:
    plain, bypass = make_actor(), make_actor(features=Features(recomputes_old_logprobs=False))
    bypass_rows = {"rollout_logprobs" if name == "old_logprobs" else name: column for name, column in rows.items()}
    assert plain.update(rows, step=1) == bypass.update(bypass_rows, step=1)


def test_a_narrower_loss_mask_is_obeyed(make_actor: MakeActor, rows: Columns) -> None:
    plain, narrow = make_actor(), make_actor(features=Features(has_loss_mask=True))
    mask = rows["response_mask"].values() & (torch.arange(len(rows["response_mask"].values())) % 3 != 0)
    rows["loss_mask"] = like(rows["response_mask"], mask)
    expected = plain.update({**rows, "response_mask": rows["loss_mask"]}, step=1)
    assert narrow.update(rows, step=1) == expected


def test_a_saved_actor_continues_to_the_bit(make_actor: MakeActor, rows: Columns, tmp_path: Path) -> None:
    original, resumed = make_actor(), make_actor()
    original.update(rows, step=1, sizes=[4, 4])
    torch.manual_seed(123)
    original.save(str(tmp_path))
    drawn = torch.rand(3)
    resumed.load(str(tmp_path))
    assert torch.equal(drawn, torch.rand(3))
    metrics = [actor.update(rows, step=2, sizes=[4, 4]) for actor in (original, resumed)]
    assert metrics[0] == metrics[1]
    assert all(torch.equal(weights(original)[name], p) for name, p in weights(resumed).items())
    assert original.num_updates == resumed.num_updates == 4
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}


def test_a_checkpoint_of_another_model_is_refused(make_actor: MakeActor, rows: Columns, tmp_path: Path) -> None:
    make_actor().save(str(tmp_path))
    other = make_actor(model=ModelSpec(str(write_tiny_model(tmp_path / "other", num_layers=1))))
    with pytest.raises(CheckpointError, match="another model"):
        other.load(str(tmp_path))


def test_published_weights_load_as_a_model(make_actor: MakeActor, rows: Columns, tmp_path: Path) -> None:
    actor = make_actor(publish_dir=str(tmp_path / "weights"))
    first = actor.publish(1)
    before = Path(first.folder, "model.safetensors").read_bytes()
    actor.update(rows, step=1)
    second = actor.publish(2)
    assert (first.version, second.version) == (1, 2)
    assert Path(first.folder, "model.safetensors").read_bytes() == before, "engines may still map it"
    with safe_open(Path(second.folder, "model.safetensors"), framework="pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118  # safe_open is no mapping
    model = AutoModelForCausalLM.from_pretrained(second.folder)
    assert all(torch.equal(p, dict(actor.model.causal_lm.named_parameters())[n]) for n, p in model.named_parameters())
    assert AutoTokenizer.from_pretrained(second.folder).eos_token == "<|end|>"
    actor.close()
    assert not (tmp_path / "weights").exists()


def test_publishing_keeps_two_versions(make_actor: MakeActor, tmp_path: Path) -> None:
    actor = make_actor(publish_dir=str(tmp_path / "weights"))
    for version in range(5):
        actor.publish(version)
    assert sorted(folder.name for folder in (tmp_path / "weights").glob("[!.]*")) == ["v3", "v4"]
    assert actor.publish(4).folder == str(tmp_path / "weights" / "v4")
    actor.close()


def test_export_is_a_hugging_face_folder(make_actor: MakeActor, rows: Columns, tmp_path: Path) -> None:
    actor = make_actor()
    actor.update(rows, step=1)
    actor.export(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, dict(actor.model.causal_lm.named_parameters())[n]) for n, p in model.named_parameters())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_experts_are_published_as_engines_know_them(make_actor: MakeActor, rows: Columns, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=264,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    actor = make_actor(model=ModelSpec(str(tmp_path / "moe")), publish_dir=str(tmp_path / "weights"))
    actor.update(rows, step=1)
    source = actor.publish(1)
    on_disk = [load_file(Path(folder, "model.safetensors")).keys() for folder in (tmp_path / "moe", source.folder)]
    assert on_disk[0] == on_disk[1]
    loaded = AutoModelForCausalLM.from_pretrained(source.folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in actor.model.causal_lm.state_dict().items())
    actor.close()


def test_float16_is_refused_for_training(make_actor: MakeActor, spec: RoleSpec) -> None:
    with pytest.raises(PreflightError, match="underflow"):
        make_actor(model=replace(spec.model, dtype="float16"))


def test_old_logprobs_come_with_the_sum_of_squares_for_token_baselines(make_actor: MakeActor, rows: Columns) -> None:
    found = make_actor(features=Features(has_token_baseline=True)).old_logprobs(rows)
    assert found.keys() == {"old_logprobs", "sum_pi_squared"}
    squares, logprobs = found["sum_pi_squared"].values(), found["old_logprobs"].values()
    assert squares.shape == logprobs.shape
    assert bool((squares >= torch.exp(2 * logprobs)).all())  # the sampled token is one term of the sum
    assert bool((squares <= 1).all())
    assert make_actor().old_logprobs(rows).keys() == {"old_logprobs"}


def test_dro_learns_where_every_advantage_is_0(make_actor: MakeActor, rows: Columns) -> None:
    still = {**rows, "advantages": like(rows["advantages"], torch.zeros_like(rows["advantages"].values()))}
    moved = make_actor(policy_loss=PolicyLossSpec(name="dro")).update(still, step=1)
    assert moved["actor/updates"] == 1
    assert make_actor().update(still, step=1)["actor/updates_without_signal"] == 1
