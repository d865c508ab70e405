"""Mistakes in configs of distillation, for the golden messages; `test_golden` adds its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """The contents of `run.toml` and other files, and the arguments. `config` is run.toml by default."""

    run: str = ""
    files: dict[str, str | bytes] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    config: tuple[str, ...] | None = None
    preset: str | None = None


DISTILL = """mode = "distill"

[data]
train = "train.parquet"

[model]
path = "Qwen/Qwen2.5-7B-Instruct"

[cluster]
gpus_per_node = 8

[distillation]
gpus_per_node = {gpus}

[teachers.math]
path = "Qwen/Qwen2.5-32B-Instruct"
match = ["gsm8k"]
backend = "vllm"
tensor_parallel = 4

[teachers.code]
path = "Qwen/Qwen2.5-14B-Instruct"
match = ["{code}"]
backend = "vllm"
replicas = {replicas}
tensor_parallel = 2
"""
ONE = 'mode = "distill"\n[teachers.t]\npath = "t"\n'
TWO = 'mode = "distill"\n[data]\ntrain = "train.jsonl"\n[teachers.a]\npath = "a"\nmatch = ["math"]\n'
ROUTED = f'{TWO}[teachers.b]\npath = "b"\nmatch = ["code"]\n'


def rows(*columns: dict[str, object]) -> str:
    return "".join(json.dumps({"prompt": "1+1", **each}) + "\n" for each in columns)


def tokenizer(*tokens: str, special: str = "<|end|>") -> dict[str, str | bytes]:
    """The files of a tokenizer with these tokens, and then the special one."""
    added = [{"id": len(tokens), "content": special, "special": True}]
    content = {"model": {"vocab": {token: i for i, token in enumerate(tokens)}}, "added_tokens": added}
    return {"tokenizer.json": json.dumps(content), "tokenizer_config.json": json.dumps({"eos_token": special})}


def models(student: dict[str, str | bytes], teacher: dict[str, str | bytes]) -> dict[str, str | bytes]:
    files = {f"student/{name}": text for name, text in student.items()}
    return {**files, **{f"teacher/{name}": text for name, text in teacher.items()}}


TWO_MODELS = 'mode = "distill"\n[model]\npath = "student"\n[teachers.t]\npath = "teacher"\n'
MATH_AND_CODE = rows({"data_source": "math"}, {"data_source": "code"})

CASES: dict[str, Case] = {
    # keys that other tools and older examples have
    "removed-resource-pool": Case('mode = "distill"\n\n[distillation]\nenable_resource_pool = true\n'),
    "removed-colocation": Case(
        f"{ONE}colocate = true\ntemperature = 0.7\n[distillation]\nshare_gpus = true\n",
    ),
    "removed-teacher-model": Case('[distillation]\nnum_workers = 8\n\n[distillation.teacher_model]\npath = "x"\n'),
    "verl-teacher": Case(
        'mode = "distill"\n[distillation]\nteacher_key = "data_source"\n'
        '[teachers.math]\nkey = "gsm8k"\nmodel_path = "Qwen/Qwen2.5-14B"\nnum_replicas = 2\n'
    ),
    # names
    "teacher-without-a-name": Case('mode = "distill"\n\n[teachers]\npath = "runs/teacher/export/hf"\n'),
    "teacher-without-a-path": Case('mode = "distill"\n\n[teachers.math]\nmatch = ["gsm8k"]\n'),
    "teacher-named-twice": Case(f'{ONE}[teachers.t]\npath = "other"\n'),
    "teacher-named-like-a-folder": Case('mode = "distill"\n[teachers."my/teacher"]\npath = "t"\n'),
    "no-teacher": Case('mode = "distill"\n'),
    # the pool
    "pool-without-nodes": Case(f"{ONE}[distillation]\nnodes = 0\ngpus_per_node = -1\n"),
    "pool-without-gpus": Case(DISTILL.format(gpus=0, code="code", replicas=2)),
    "pool-does-not-add-up": Case(DISTILL.format(gpus=8, code="code", replicas=3)),
    "replica-straddles-nodes": Case(
        'mode = "distill"\n[distillation]\nnodes = 2\ngpus_per_node = 3\n'
        '[teachers.a]\npath = "a"\nbackend = "vllm"\ntensor_parallel = 2\nreplicas = 3\n'
    ),
    # losses
    "k1-supervised": Case('mode = "distill"\n[distillation]\nloss = "k1"\n[teachers.t]\npath = "t"\n'),
    "unknown-divergence": Case(f'{ONE}[distillation]\nloss = "forward_kl_top"\n'),
    "top-k-of-zero": Case(f'{ONE}[distillation]\nloss = "forward_kl_topk"\ntop_k = 0\n'),
    "top-k-over-the-engine": Case(
        'mode = "distill"\n[distillation]\nloss = "forward_kl_topk"\ntop_k = 2048\n'
        '[teachers.t]\npath = "t"\nbackend = "vllm"\n'
    ),
    "top-k-as-an-advantage": Case(
        f'{ONE}[distillation]\nloss = "forward_kl_topk"\nupdate = "policy_gradient"\n',
    ),
    "whole-vocabulary-of-vllm": Case(f'{ONE}backend = "vllm"\n[distillation]\nloss = "reverse_kl"\n'),
    "weight-of-the-only-loss": Case(f"{ONE}[distillation]\ncoef = 0.5\ntop_k = 8\n"),
    "temperature-of-the-student": Case(f"{ONE}[rollout]\ntemperature = 0.7\n"),
    "dropped-and-stopped": Case(f'{ONE}[distillation]\non_teacher_failure = "drop"\n'),
    # engines
    "unknown-teacher-engine": Case(f'{ONE}backend = "tensorrt"\n'),
    "teacher-engine-lacks-it": Case(f'{ONE}tensor_parallel = 2\nendpoints = ["node:8000"]\n[distillation]\n'),
    "teacher-context-too-short": Case(
        'mode = "distill"\n[rollout]\nmax_new_tokens = 256\n[data]\nmax_prompt_tokens = 256\n'
        '[teachers.t]\npath = "t"\nmax_context_tokens = 512\n'
    ),
    # routing
    "teacher-without-a-route": Case(f'{TWO}[teachers.b]\npath = "b"\n', {"train.jsonl": MATH_AND_CODE}),
    "teacher-route-twice": Case(DISTILL.format(gpus=8, code="gsm8k", replicas=2)),
    "source-without-a-teacher": Case(
        'mode = "distill"\n[data]\ntrain = "train.jsonl"\n[teachers.t]\npath = "t"\nmatch = ["math"]\n',
        {"train.jsonl": '{"prompt": "1+1", "data_source": "math"}\n{"prompt": "hi", "data_source": "chat"}\n'},
    ),
    "row-without-a-route": Case(
        f'{ROUTED}[distillation]\nroute_by = "topic"\n',
        {
            "train.jsonl": rows({"extra_info": {"topic": "math"}}, {"extra_info": {"topic": "code"}}, {"topic": None})
            + rows({"data_source": "math"})
        },
    ),
    "route-that-no-row-takes": Case(
        ROUTED, {"train.jsonl": rows({"data_source": "math"}, {"data_source": "codes"}, {"data_source": "math"})}
    ),
    "route-of-one-teacher": Case(f'{ONE}[distillation]\nroute_by = "topic"\n'),
    # vocabularies
    "teacher-of-another-family": Case(
        'mode = "distill"\n[model]\npath = "Qwen/Qwen2.5-7B"\n[teachers.t]\npath = "meta-llama/Llama-3.1-8B"\n'
    ),
    "teacher-with-other-tokens": Case(TWO_MODELS, models(tokenizer(*"abcdefg"), tokenizer(*"abdcegh"))),
    "teacher-with-another-end": Case(
        TWO_MODELS,
        models(
            tokenizer("a", "<|stop|>"),
            {**tokenizer("a", "<|stop|>"), "tokenizer_config.json": '{"eos_token": "<|stop|>"}'},
        ),
    ),
    # teachers that are made, and their own prompts
    "self-teacher-that-knows-no-more": Case('mode = "distill"\n[teachers.self]\npath = "student"\n'),
    "prompt-of-a-column-that-is-not-there": Case(
        'mode = "distill"\n[data]\ntrain = "train.jsonl"\n'
        '[teachers.self]\npath = "student"\nprompt = "{prompt} Hint: {hint}"\n',
        {"train.jsonl": rows({"hint": "two"}, {"hnt": "three"})},
    ),
    "prompt-without-the-question": Case(
        'mode = "distill"\n[teachers.self]\npath = "student"\nprompt = "The answer is {answer}"\n'
    ),
    "prompt-with-a-stray-brace": Case(
        'mode = "distill"\n[teachers.self]\npath = "student"\nprompt = "{prompt} {answer"\n'
    ),
    "task-teacher-of-a-large-student": Case(
        'mode = "distill"\n[model]\npath = "Qwen/Qwen2.5-7B"\n[teachers.t]\npath = "task:sort"\n'
    ),
    "task-teacher-of-no-task": Case('mode = "distill"\n[teachers.t]\npath = "task:sorted"\n'),
}
