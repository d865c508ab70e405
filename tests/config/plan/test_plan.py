"""The plan's numbers, worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.facts import running_rows
from tqppo.config.plan.memory import Training, adapter_parameters, engine_memory, total, training_memory
from tqppo.config.plan.model_shape import ModelShape
from tqppo.config.plan.plan import Plan, make_plan
from tqppo.config.plan.shapes import from_json, shape_of, tiny_shape
from tqppo.config.plan.text import plan_text


def plan_of(preset: str, *sets: str) -> Plan:
    compilation = compile_config(preset, [], sets, {})
    assert compilation.ok
    return make_plan(compilation)


def test_rows_mini_batches_and_updates_of_the_quickstart() -> None:
    plan = plan_of("quickstart", "data.batch_size=32", "rollout.group_size=8", "actor.mini_batch_size=16")
    assert (plan.rows, plan.multiple, plan.padding) == (256, 128, 0)
    assert (plan.mini_batches, plan.updates) == ({"actor": 2}, {"actor": 2})
    plan = plan_of("quickstart", "actor.mini_batch_size=8", "actor.epochs=3")
    assert (plan.mini_batches, plan.updates) == ({"actor": 4}, {"actor": 12})


def test_padding_adds_a_mini_batch() -> None:
    plan = plan_of("quickstart", "data.batch_size=20", "rollout.group_size=8", "actor.mini_batch_size=16")
    assert (plan.rows, plan.padding, plan.mini_batches["actor"]) == (160, 96, 2)


def test_sessions_of_several_trajectories_are_counted_as_rows() -> None:
    text = plan_text(plan_of("grpo-agent-tiny", "rollout.max_trajectories=3"))
    assert "A step: 32 prompts × 8 sessions = 256 to 768 rows\n" in text
    assert "a session is 1 to 3 trajectories, a row each" in text
    assert "A step: 32 prompts × 8 sessions = 256 rows\n" in plan_text(plan_of("quickstart"))


def test_seven_billion_parameters_over_eight_ranks() -> None:
    actor = next(role for role in plan_of("grpo-7b").roles if role.name == "actor")
    parts = {part.name: part.num_bytes for part in actor.memory}
    n, outer, layer = 7_615_487_488, 2 * 152_064 * 3584 + 3584, 233_053_184
    assert parts["weights"] == parts["gradients"] == 4 * n / 8
    assert parts["optimizer"] == 8 * n / 8
    assert parts["gathered weights"] == 2 * (outer + 2 * layer)
    assert parts["new gradients"] == 2 * 152_064 * 3584 + 4 * layer
    # the inputs of 28 layers, and one layer at work
    assert parts["activations"] == (28 + 6 * 18_944 / 3584 + 12) * 16_384 * 3584 * 2


def test_kv_cache_of_qwen_by_hand() -> None:
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    assert shape is not None
    weights, cache = engine_memory(shape, dtype="bfloat16", tensor_parallel=2, rows=10, context=1000)
    assert cache.num_bytes == 2 * 28 * 4 * 128 * 2 * 10_000 / 2  # keys and values, layers, heads, size, bytes, tokens
    assert weights.num_bytes == 7_615_487_488


@pytest.mark.parametrize(
    ("sets", "kept"),
    [
        ((), 2 * 2 * 64 * 4 * 256 * 64),  # keys and values, layers, hidden size, bytes, sessions, context
        (("rollout.max_sessions=100",), 2 * 2 * 64 * 4 * 100 * 64),
        (("rollout.prefix_cache_gb=0.001",), int(0.001 * 2**30)),
        (("rollout.prefix_cache_gb=0",), None),
    ],
)
def test_the_caches_of_sessions_between_turns_are_planned(sets: tuple[str, ...], kept: int | None) -> None:
    engine = plan_of("grpo-agent-tiny", *sets).roles[0]
    assert {part.name: part.num_bytes for part in engine.memory}.get("kept prefixes") == kept


def test_an_agent_of_one_turn_keeps_no_caches() -> None:
    assert [part.name for part in plan_of("quickstart").roles[0].memory] == ["weights", "KV cache"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B", 0.494),
        ("Qwen/Qwen2.5-7B-Instruct", 7.615),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 32.763),
        ("Qwen/Qwen3-0.6B", 0.596),
        ("Qwen/Qwen3-8B", 8.191),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.236),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8.030),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.554),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.1345),
    ],
)
def test_known_names_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    shape = shape_of(name)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_an_unknown_name_gives_no_estimate_and_says_so() -> None:
    plan = plan_of("grpo-7b", "model.path=acme/new-model")
    assert plan.parameters is None
    assert "not a known name" in plan_text(plan)


def test_a_folder_is_read_from_its_config_json(tmp_path: Path) -> None:
    values = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    values |= {"vocab_size": 10, "max_position_embeddings": 64, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = shape_of(str(tmp_path))
    assert shape is not None
    # embedding 10·8, attention 4·8·8, MLP 3·8·16, norms 2·8, last norm 8
    assert shape.parameters == 80 + 256 + 384 + 16 + 8
    assert (shape.context, shape.source) == (64, "config.json")
    assert from_json({"vocab_size": 3}) is None
    (tmp_path / "config.json").write_text("{")
    assert shape_of(str(tmp_path)) is None


def test_the_tiny_shape_is_that_of_the_model_that_is_made(tiny_model: Path) -> None:
    made = shape_of(str(tiny_model))
    assert made is not None
    assert made.parameters == tiny_shape(hidden=64, layers=2, heads=2, tied=True).parameters
    from safetensors import safe_open

    with safe_open(tiny_model / "model.safetensors", framework="np") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    count = sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in sizes.items() if "lm_head" not in name
    )
    assert count == made.parameters


def test_lora_trains_only_its_adapter() -> None:
    shape = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, intermediate=16, vocabulary=10, context=64)
    # q and o: 8 + 8, k and v: 8 + 4, three MLP layers: 8 + 16
    assert adapter_parameters(shape, 4) == 2 * 4 * (2 * 16 + 2 * 12 + 3 * 24)
    parts = {part.name for part in training_memory(shape, Training(1, 64, "bfloat16", lora_rank=4))}
    assert {"weights", "adapter", "activations"} <= parts
    assert not {"gradients", "optimizer", "new gradients"} & parts


def test_a_frozen_role_needs_less_than_one_that_learns() -> None:
    shape = shape_of("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    frozen = total(training_memory(shape, Training(1, 1024, "bfloat16", learns=False)))
    assert frozen < total(training_memory(shape, Training(1, 1024, "bfloat16", checkpointing=True))) / 3


def test_roles_follow_the_mode() -> None:
    def roles(preset: str, *sets: str) -> list[str]:
        return [role.name for role in plan_of(preset, *sets).roles]

    assert roles("quickstart") == ["rollout", "actor", "storage"]
    assert roles("ppo-7b") == ["rollout", "actor", "critic", "reference", "storage"]
    assert roles("distill-7b") == ["rollout", "actor", "teacher math", "teacher code", "storage"]
    assert roles("grpo-7b", "model.lora_rank=16", "reference.ranks=1") == ["rollout", "actor", "storage"]


def test_ranks_that_share_rows_are_planned_with_what_each_of_them_holds() -> None:
    """A forward has twice as many tokens over two ranks, and each rank as many as before."""
    plain, shared = (
        plan_of("grpo-7b", f"actor.context_parallel={together}", "actor.ranks=8", "cluster.gpus_per_node=8")
        for together in (1, 2)
    )
    roles = [next(role for role in plan.roles if role.name == "actor") for plan in (plain, shared)]
    assert roles[0].memory == roles[1].memory
    assert roles[1].devices == "8 GPUs, shared, 2 to a row"


def test_the_plan_says_what_is_written_where() -> None:
    plan = plan_of("quickstart", "run.name=mine", "run.dir=out", "logging.trajectories=10")
    assert [path for path, _ in plan.files] == [
        "out/mine/",
        "out/mine/checkpoints/",
        "out/mine/trajectories/",
        "out/mine/export/hf/",
    ]


def test_the_plan_says_what_is_done_at_the_same_time_and_with_which_weights() -> None:
    text = plan_text(plan_of("quickstart", "rollout.ahead=2"))
    assert "while the other stages compute step N, the engines sample step N + 2\n" in text
    assert "step N trains on groups of the weights after step N − 3\n" in text
    assert "columns of 3 steps" in text
    assert "in one process: before the other stages compute step N, the engines sample step N + 1" in plan_text(
        plan_of("quickstart", "rollout.ahead=1", "cluster.in_process=true")
    )
    assert "step N" not in plan_text(plan_of("quickstart"))


def test_rows_and_weights_of_steps_in_flight_are_planned() -> None:
    def shared(*sets: str) -> dict[str, float]:
        return {part.name.partition(" ")[0]: part.num_bytes for part in plan_of("quickstart", *sets).budget.shared}

    alone, ahead = shared(), shared("rollout.ahead=3")
    assert ahead["columns"] == 4 * alone["one"]
    assert ahead["published"] == 2 * alone["published"]
    assert shared("rollout.ahead=1")["published"] == alone["published"]


def test_formulas_are_shown_on_request_and_the_plan_is_data() -> None:
    plan = plan_of("grpo-7b")
    assert "4·N/r = 4 × 7,615,487,488 / 8" in plan_text(plan, formulas=True)
    assert "4·N/r" not in plan_text(plan)
    assert json.loads(json.dumps(plan.as_dict()))["rows"] == 1024


def test_a_replica_runs_no_more_rows_than_there_are() -> None:
    def running(*sets: str) -> int:
        return running_rows(compile_config("quickstart", [], sets, {}).draft)

    few = ("validation.num_prompts=4", "data.batch_size=16", "actor.mini_batch_size=16", "rollout.group_size=4")
    assert running(*few) == 64
    assert running(*few, "rollout.replicas=3") == 22
    assert running(*few, "rollout.max_running=10") == 10
    assert running(*few, "validation.num_prompts=50") == 100  # a greedy and a sampled answer each


def test_a_preset_whose_name_has_a_dot_keeps_it() -> None:
    assert compile_config("grpo-0.5b", environ={}).name == "grpo-0.5b"
    assert plan_of("grpo-0.5b").files[0][0].startswith("runs/grpo-0.5b-")


def test_a_critic_has_no_output_layer() -> None:
    roles = {role.name: role for role in plan_of("ppo-7b").roles}
    actor, critic = (
        next(p.num_bytes for p in roles[name].memory if p.name == "weights") for name in ("actor", "critic")
    )
    assert actor - critic == 4 * 152_064 * 3584 / 8
    assert "logits" not in {part.name for part in roles["critic"].memory}
