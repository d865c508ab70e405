"""The exact message for each mistake, kept in tests/golden.

After a change of wording: TQPPO_GOLDEN=write pytest tests/config/test_golden.py, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.config import distill_cases
from tests.config.distill_cases import Case
from tqppo.cli import app
from tqppo.config.compilation import Compilation
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text

GOLDEN = Path(__file__).parents[1] / "golden"


CASES: dict[str, Case] = {
    # keys
    "unknown-key": Case("[actor]\nlearning-rate = 1e-4\nepoch = 2\n"),
    "unknown-section": Case("[rolout]\ngroup_size = 4\n"),
    "key-of-another-section": Case("[data]\ngroup_size = 4\n"),
    "verl-names": Case("[actor_rollout_ref.rollout]\nn = 8\n\n[actor_rollout_ref.actor]\nppo_mini_batch_size = 32\n"),
    "trl-names": Case("num_generations = 8\nbeta = 0.04\n"),
    "prime-rl-names": Case("[orchestrator]\nrollouts_per_example = 16\n\n[ckpt]\ninterval = 25\n"),
    "section-as-a-value": Case('rollout = "vllm"\n'),
    # values
    "wrong-types": Case('[actor]\nlr = "1e-3"\nepochs = 2.0\ngradient_checkpointing = "true"\n[data]\ntrain = 3\n'),
    "wrong-list-element": Case('[rollout]\nstop_token_ids = [1, 2, "three"]\n'),
    "wrong-choice": Case('[algorithm]\nadvantage = "grp"\naggregate = "token_mean"\n'),
    "out-of-range": Case("[rollout]\ntop_p = 1.5\ntemperature = 0.0\n[actor]\nlr = nan\n"),
    "unknown-backend": Case('[rollout]\nbackend = "vlm"\n[storage]\nbackend = "redis"\n'),
    "unknown-task": Case('[data]\ntrain = "task:sorting"\n'),
    "unknown-task-argument": Case('[data]\ntrain = "task:sort"\ntask_args = { digit = 4 }\n'),
    # layers
    "set-and-environment": Case(
        sets=("actor.lr=fast", "rollout.backnd=vllm"), environ={"TQPPO__RUN__MAX_STEPS": "many"}
    ),
    "bad-set": Case(sets=("actor.lr", "data.train=[1, 2", "a b=3")),
    "mistake-in-a-base": Case('extends = "mine"\n[actor]\nlr = 1e-4\n', {"presets/mine.toml": "[actor]\nepochs = 0\n"}),
    "unknown-preset": Case(preset="quikstart"),
    "extends-cycle": Case('extends = "a.toml"\n', {"a.toml": 'extends = "b.toml"\n', "b.toml": 'extends = "a.toml"\n'}),
    "extends-wrong-type": Case("extends = 3\n"),
    # files
    "toml-syntax": Case("[run]\nmax_steps = \nseed = zero\ndeterministic = True\n[actor\nlr = 1\n"),
    "missing-file": Case(config=("rum.toml",)),
    "directory": Case("seed = 1\n", {"folder/a.toml": ""}, config=("folder",)),
    "not-utf-8": Case(files={"latin.toml": "[run]\nname = 'é'\n".encode("latin-1")}, config=("latin.toml",)),
    "empty-file": Case("# nothing yet\n"),
    "ten-megabytes": Case(files={"big.toml": b"#" * 10_485_760}, config=("big.toml",)),
    "deep-nesting": Case("x = " + "[" * 40 + "]" * 40 + "\n"),
    "one-process-of-many": Case(
        '[rollout]\nbackend = "vllm"\nreplicas = 2\n[storage]\nbackend = "ray"\n[actor]\nranks = 2\n',
        sets=("cluster.in_process=true",),
    ),
    # arithmetic
    "mini-batch-and-ranks": Case(
        "[data]\nbatch_size = 128\n[rollout]\ngroup_size = 8\n[actor]\nmini_batch_size = 32\nranks = 7\n"
    ),
    "mini-batch-over-batch": Case("[data]\nbatch_size = 24\n[actor]\nmini_batch_size = 32\n"),
    "padding-explosion": Case(
        'mode = "ppo"\n[data]\nbatch_size = 256\n[rollout]\ngroup_size = 8\n'
        "[actor]\nmini_batch_size = 192\nranks = 8\n[critic]\nmini_batch_size = 256\nranks = 8\n"
    ),
    "single-session-group": Case('mode = "grpo"\n[rollout]\ngroup_size = 1\n'),
    "context-too-short": Case(
        "[rollout]\nmax_new_tokens = 2048\nmax_context_tokens = 2048\n[data]\nmax_prompt_tokens = 512\n"
    ),
    "context-over-the-model": Case('[model]\npath = "Qwen/Qwen2.5-Math-7B"\n[rollout]\nmax_new_tokens = 8192\n'),
    "row-over-micro-batch": Case("[rollout]\nmax_new_tokens = 3000\n[actor]\nmicro_batch_tokens = 2048\n"),
    # algorithm
    "gae-without-critic": Case('mode = "grpo"\n[algorithm]\nadvantage = "gae"\n'),
    "critic-without-ppo": Case('mode = "grpo"\n[critic]\nlr = 1e-4\n'),
    "preset-overtaken": Case('mode = "ppo"\n[critic]\nlr = 1e-4\n', sets=("mode=grpo",)),
    "kl-without-estimator": Case('[algorithm]\nkl_loss_coef = 0.01\n[reference]\npath = "base"\n'),
    "kl-without-weight": Case('[algorithm]\nkl_loss = "k3"\n'),
    "adaptive-kl-from-zero": Case('[algorithm]\nkl_reward = "k1"\nkl_controller = "adaptive"\n'),
    "correction-of-nothing": Case('[algorithm]\nold_logprobs = "rollout"\ncorrection = "token"\n'),
    "ahead-of-its-log-probabilities": Case("[rollout]\nahead = 2\n"),
    "filter-before-the-score": Case('[algorithm]\nfilter_groups = true\n[reward_model]\npath = "rm"\n'),
    # engines
    "engine-lacks-it": Case('[rollout]\nbackend = "embedded"\ntensor_parallel = 2\nendpoints = ["localhost:8000"]\n'),
    "engine-argument-of-ours": Case(
        '[rollout]\nbackend = "vllm"\nengine_args = { max_num_seqs = 8, enforce-eager = true }\n',
        sets=("rollout.engine_args.port=1",),
    ),
    "heads-too-small-to-serve": Case('[model]\nnum_heads = 8\n[rollout]\nbackend = "vllm"\n'),
    "too-few-gpus": Case("[cluster]\ngpus_per_node = 4\n[actor]\nranks = 8\n"),
    "actor-over-the-gpu": Case(
        '[model]\npath = "Qwen/Qwen2.5-1.5B"\n[actor]\nmicro_batch_tokens = 16_384\n'
        "[cluster]\ngpus_per_node = 1\ngpu_memory_gb = 40.0\n[rollout]\nmax_new_tokens = 2048\n"
    ),
    "engine-over-its-share": Case(
        '[model]\npath = "Qwen/Qwen2.5-7B"\nlora_rank = 16\n[actor]\ngradient_checkpointing = true\nranks = 2\n'
        '[rollout]\nbackend = "vllm"\nreplicas = 2\nmemory_fraction = 0.15\n'
        "[cluster]\ngpus_per_node = 2\ngpu_memory_gb = 80.0\n"
    ),
    "ahead-of-roles-on-its-gpus": Case(
        '[rollout]\nbackend = "vllm"\nahead = 1\n[model]\npath = "Qwen/Qwen2.5-1.5B"\n'
        '[algorithm]\nold_logprobs = "rollout"\n[cluster]\ngpus_per_node = 1\ngpu_memory_gb = 80.0\n'
    ),
    # data and rewards
    "data-of-the-hub": Case('[data]\ntrain = "openai/gsm8k"\n'),
    "data-weights": Case('[data]\ntrain = ["task:sort", "task:add"]\nweights = [1.0, 2.0, 3.0]\n'),
    "reward-weights": Case('[reward]\nfunction = ["exact_match", "length"]\nweights = [1.0]\n'),
    "reward-arguments": Case('[reward]\nfunction = ["exact_match", "length"]\nfunction_args = { most = 5 }\n'),
    "validation-without-data": Case('[data]\ntrain = "mine.jsonl"\n[validation]\ninterval = 10\n'),
    # what newcomers write
    "key-twice": Case("[actor]\nlr = 1e-4\nepochs = 2\nlr = 1e-5\n"),
    "table-in-a-section": Case("[actor.optimizer]\nkind = 3\n"),
    "huge-seed": Case("[run]\nseed = 123456789012345678901\n"),
    "name-of-another-folder": Case('[run]\nname = "../x y"\n'),
    "single-underscore": Case("[actor]\nlr = 1e-4\n", environ={"TQPPO_ACTOR_LR": "1e-3"}),
    **distill_cases.CASES,
}


def compiled(case: Case, folder: Path) -> Compilation:
    for name, content in {"run.toml": case.run, **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    default = ("run.toml",) if case.run else ()
    return compile_config(case.preset, default if case.config is None else case.config, case.sets, case.environ)


@pytest.mark.parametrize("name", CASES)
def test_message_reads_as_it_was_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = render_text(compiled(CASES[name], tmp_path).diagnostics)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("TQPPO_GOLDEN") == "write":
        golden.write_text(said, encoding="utf-8")
    assert said == golden.read_text(encoding="utf-8")


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("name", distill_cases.CASES)
def test_a_mistake_in_distillation_ends_the_command_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = compiled(CASES[name], tmp_path).diagnostics
    result = CliRunner().invoke(app, ["validate-config", "--config", "run.toml", *CASES[name].sets])
    assert result.exit_code == (3 if any(each.severity == "error" for each in found) else 0), result.output
