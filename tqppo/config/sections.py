"""Every setting a user can write, with its default and its documentation. Imports no torch.

The string under a field is its documentation: `tqppo config explain` and `tqppo schema` print it.
Types and ranges of single values are declared here; checks across settings are in `checks/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tqppo import dataflow

if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(dataflow.mode_names())]  # installed packages may add modes
Kl = Literal["none", "k1", "abs", "k2", "k3", "k1+", "k2+", "k3+"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
ProcessCount = Annotated[int, Field(ge=1, le=10_000)]  # of a role, or nodes; each gets a place in the plan
GpusPerNode = Annotated[int, Field(ge=0, le=128)]
GpusPerEngine = Annotated[int, Field(ge=1, le=128)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A table of the config: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSection(Section):
    name: str = ""
    """Folder of the run under `run.dir`. Empty: `<preset>-<model>-<date and time>`."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """The one seed: data order, sampling and initialisation all derive from it."""
    max_steps: Positive = 100
    """Training steps in total, counted from the first start: resuming a run does not add to them."""
    deterministic: bool = True
    """The same config and seed give the same bytes. The embedded engine then admits requests at barriers."""
    threads: NonNegative = 0
    """Torch threads per worker process. 0: the cores that no other process needs then; with a GPU torch's choice."""
    cores: NonNegative = 0
    """CPU cores that the processes share. 0: this machine's (or OMP_NUM_THREADS), written down as the run starts."""


class ModelSection(Section):
    path: str = "tiny"
    """A folder or hub name that `transformers` loads, or `tiny`: a small model made from this section, no download."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer. Empty: the model's own."""
    trust_remote_code: bool = False
    """Allow the model's repository to run its own code."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of the computation; trained parameters stay float32. auto: bfloat16 on GPUs, float32 on CPUs."""
    attention: Literal["auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel; flash and flex pack rows, flex compiles first. auto: flash where installed (GPU), else sdpa."""
    lora_rank: NonNegative = 0
    """Rank of LoRA adapters; 0 trains all weights. Without reference.path, the actor minus adapter is the reference."""
    lora_alpha: PositiveFloat = 32.0
    """LoRA scale: updates are multiplied by lora_alpha / lora_rank."""
    lora_targets: list[str] = ["all-linear"]
    """Modules that get an adapter, as `peft` names them."""
    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    """Architecture of the tiny model."""
    hidden_size: Positive = 64
    """Width of the tiny model."""
    num_layers: Positive = 2
    """Layers of the tiny model."""
    num_heads: Positive = 2
    """Attention heads of the tiny model; hidden_size / num_heads of 32 or 64 can be served by vLLM and SGLang."""
    tie_embeddings: bool = True
    """Whether the tiny model's output head is its embedding."""


class WarmStartSection(Section):
    steps: NonNegative = 0
    """Supervised steps on demonstrations before RL; 0 turns it off. With LoRA, adapters learn and are then merged."""
    data: str | list[str] = ""
    """Demonstrations, written like data.train. Empty: the task's own, for the tiny model only."""
    batch_size: Positive = 128
    """Demonstrations per warm-start step."""
    lr: NonNegativeFloat = 0.0
    """Learning rate of the warm start. 0: 3e-3 for the tiny model, 1e-4 for LoRA, 1e-5 otherwise."""


class DataSection(Section):
    train: str | list[str] = "task:sort"
    """`task:NAME`, files (JSONL, JSON, CSV, parquet; `*` for several), `hub:NAME:SUBSET@SPLIT`, `gym:NAME`."""
    weights: list[PositiveFloat] = []
    """Shares of the sources in data.train, such as `[3, 1]`: three prompts of the first to one of the second."""
    task_args: dict[str, int | float | str | bool] = {}
    """Arguments of the procedural task, such as `{digits = 4}`."""
    size: Positive = 10_000
    """Number of training prompts of a procedural task; held-out prompts never overlap with them."""
    batch_size: Positive = 32
    """Prompts per step."""
    shuffle: bool = True
    """Reorder the prompts each epoch, by seed and epoch."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens, after the chat template."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with a longer prompt: stop, leave it out (counted), or keep its last tokens (counted)."""
    prompt_key: str = "auto"
    """Column with the prompt: a string or a list of chat messages. auto: prompt, question, messages and so on."""
    answer_key: str = "auto"
    """Column with the reference answer; a dot goes into a nested one. auto: as verl, TRL name it. Empty: none."""
    source_key: str = "data_source"
    """Column with the source of a row; rewards, validation and teachers can differ by source."""
    system_prompt: str = ""
    """System message for prompts that are plain strings. Empty: none."""
    chat_template: bool = True
    """Apply the tokenizer's chat template; off: use the prompt's text unchanged."""


class RolloutSection(Section):
    backend: str = "embedded"
    """Engine that generates: embedded, vllm, sglang, or an installed plug-in; `tqppo backends list` shows them."""
    group_size: Positive = 8
    """Sessions sampled per prompt. GRPO needs at least 2."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are those of the tempered distribution, in training too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: smallest set of tokens with this probability mass. 1 turns it off."""
    top_k: NonNegative = 0
    """Sample among the k likeliest tokens. 0 turns it off."""
    max_new_tokens: Positive = 256
    """Longest response, in tokens."""
    max_context_tokens: NonNegative = 0
    """Longest prompt + response that the engine accepts. 0: data.max_prompt_tokens + rollout.max_new_tokens."""
    stop_token_ids: list[int] = []
    """Tokens that end a response, besides the tokenizer's end-of-sequence token."""
    agent: str = "single_turn"
    """The agent loop: single_turn, tools, rewrite, environment, or your own as `module:Class` or `file.py:Class`."""
    agent_args: dict[str, Any] = {}
    """Arguments of the agent loop."""
    max_trajectories: Positive = 1
    """Largest number of trajectories per session (context rewriting, sub-agents)."""
    replicas: ProcessCount = 1
    """Engine processes; prompts are spread over them by whole groups."""
    max_running: Positive = 256
    """Sequences that one replica decodes at once."""
    max_sessions: NonNegative = 0
    """Sessions that one replica plays at a time, tools included. 0: all of them."""
    prefix_cache_gb: NonNegativeFloat = 1.0
    """GiB per replica for caches of sessions between turns (embedded). 0: every turn computes all of its tokens."""
    tensor_parallel: GpusPerEngine = 1
    """GPUs per replica (vllm, sglang)."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of a GPU's memory for the engine's weights and KV cache (vllm, sglang)."""
    python: str = ""
    """Interpreter of the engine's own environment. Empty: the one that `tqppo backends install` made."""
    endpoints: list[str] = []
    """Attach to servers that already run, such as `["http://node1:8000"]`, instead of starting them."""
    engine_args: dict[str, Any] = {}
    """Further arguments of the engine (vllm, sglang): `{enforce-eager = true}` becomes `--enforce-eager`."""
    host: str = "127.0.0.1"
    """Address that started servers bind to. They answer only to a bearer token that tqppo makes."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest time for an engine to become healthy."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest time for one request."""
    max_restarts: NonNegative = 3
    """Number of restarts of a dead replica before the run fails."""
    weight_sync: Literal["auto", "file", "broadcast"] = "auto"
    """How new weights reach engines: as a file, by broadcast (vllm, sglang), or auto: by broadcast between nodes."""
    verify_weights: bool = True
    """After each weight sync, compare checksums of all copied tensors, and the log-probabilities of a probe."""
    ahead: NonNegative = 0
    """Steps that engines sample ahead: step N trains on groups of the weights after step N − 1 − ahead. 0: in turn."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time that a step waits for its groups; the error names the missing prompts."""
    on_incomplete_group: Literal["error", "drop", "keep", "refill"] = "error"
    """When a session fails: stop, drop the group, train on its other sessions, or sample another prompt instead."""
    session_retries: NonNegative = 0
    """Further attempts at a session whose agent loop fails, with the same seeds, before on_incomplete_group applies."""
    on_short_batch: Literal["error", "train"] = "train"
    """When refill or filter_groups run out of rounds: stop, or train on fewer groups and say so."""


class StorageSection(Section):
    backend: str = "simple"
    """Where tensors live between stages: simple (shared memory), ray (object store), transferqueue (extra)."""
    budget_gb: PositiveFloat = 4.0
    """GiB of tensors per node. A put over budget waits for room; its timeout error lists what holds the memory."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of every queue call."""
    dir: str = ""
    """Folder of the shared-memory segments. Empty: /dev/shm, or the temporary folder where that is too small."""


class AlgorithmSection(Section):
    advantage: Literal[
        "gae",
        "grpo",
        "dr_grpo",
        "grpo_passk",
        "rloo",
        "opo",
        "gpg",
        "gdpo",
        "gigpo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ] = "grpo"
    """Advantage estimator. Unset: the mode's own. `gae` needs a critic; the others compare sessions."""
    loss: Literal["ppo", "gspo", "cispo", "gpg", "geo_mean", "sapo", "dppo_tv", "dppo_kl", "dro"] = "ppo"
    """Policy loss."""
    aggregate: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "session-mean"
    ] = "token-mean"
    """How token losses become one number; the same for any cut into micro-batches and ranks."""
    horizon: NonNegative = 0
    """Constant divisor of seq-mean-token-sum-norm. 0: rollout.max_new_tokens."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """GAE's λ: at 0 advantages trust the critic alone, at 1 the rewards alone. Below 1 a reward at the end fades."""
    clip_low: NonNegativeFloat = 0.2
    """Ratios under 1 − clip_low are clipped. dppo_tv, dppo_kl: most that the probability of a token may fall."""
    clip_high: NonNegativeFloat = 0.2
    """Ratios over 1 + clip_high are clipped; DAPO's clip-higher sets it above clip_low. dppo_*: most it may rise."""
    clip_dual: Annotated[float, Field(ge=0)] = 3.0
    """Dual clip: bounds the loss of negative advantages to this · |advantage| (dppo_*: the ratio). Above 1; 0: off."""
    sapo_tau_positive: PositiveFloat = 1.0
    """SAPO's temperature for positive advantages."""
    sapo_tau_negative: PositiveFloat = 1.05
    """SAPO's temperature for negative advantages."""
    dro_beta: NonNegativeFloat = 0.1
    """DRO's weight of the squared log-ratio to the old policy."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_reward: Kl = "none"
    """KL estimator whose value is subtracted from the token rewards. Needs a reference and kl_reward_coef > 0."""
    kl_reward_coef: NonNegativeFloat = 0.0
    """β of the KL in the reward. 0: no KL in the reward, and no reference for it."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep β, or steer it towards kl_target."""
    kl_target: PositiveFloat = 0.1
    """KL per sequence that the adaptive controller aims for."""
    kl_horizon: Positive = 10_000
    """Rows over which the adaptive controller changes β."""
    kl_loss: Kl = "none"
    """KL estimator added to the loss. Needs a reference and kl_loss_coef > 0."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL in the loss. 0: no KL in the loss, and no reference for it."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Compute the old log-probabilities with the trainer, or take the engine's. One update per step needs neither."""
    correction: Literal["none", "token", "sequence", "icepop"] = "none"
    """Importance weights for the difference between engine and trainer. Needs old_logprobs = "recompute"."""
    correction_cap: PositiveFloat = 2.0
    """Upper bound of the importance weights; icepop drops tokens above it."""
    correction_floor: NonNegativeFloat = 0.5
    """Lower bound of icepop: tokens below it are dropped."""
    reject: Literal["none", "token", "seq_mean", "seq_sum", "seq_max"] = "none"
    """Mask tokens or sequences whose engine and trainer log-probabilities are too far apart."""
    reject_threshold: PositiveFloat = 2.0
    """Largest ratio (or its inverse) that `reject` keeps."""
    credit: Literal["session", "trajectory", "turn"] = "session"
    """What earns: sessions by their last trajectory, or each trajectory or turn what the agent loop gave it."""
    turn_gamma: Fraction = 0.95
    """Discount per turn of the rewards of later turns (gigpo; credit = "turn" where sessions are compared)."""
    gigpo_weight: NonNegativeFloat = 1.0
    """GiGPO's ω: weight of the comparison of turns that began in one state, added to that of whole sessions."""
    gigpo_std: bool = True
    """Divide GiGPO's advantages by the deviation of their group."""
    single_session: Literal["zero", "raw"] = "zero"
    """Advantage of a group with one session: 0, or its reward as it is."""
    filter_groups: bool = False
    """Dynamic sampling: groups whose sessions all have the same reward are replaced by new prompts before training."""
    filter_max_rounds: Positive = 4
    """Most rounds of new prompts per step, for filter_groups and for rollout.on_incomplete_group = "refill" alike."""


_CLIPS = ("clip_low", "clip_high")
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo": (*_CLIPS, "clip_dual"),
    "gspo": _CLIPS,
    "cispo": _CLIPS,
    "gpg": (),
    "geo_mean": _CLIPS,
    "sapo": ("sapo_tau_positive", "sapo_tau_negative"),
    "dppo_tv": (*_CLIPS, "clip_dual"),
    "dppo_kl": (*_CLIPS, "clip_dual"),
    "dro": ("dro_beta",),
}
"""The settings that each value of `algorithm.loss` uses; with another loss they have no effect."""

_BY_CREDIT = ("single_session", "credit", "turn_gamma")
ADVANTAGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "credit"),
    "grpo": _BY_CREDIT,
    "dr_grpo": _BY_CREDIT,
    "grpo_passk": _BY_CREDIT,
    "rloo": _BY_CREDIT,
    "opo": _BY_CREDIT,
    "gpg": _BY_CREDIT,
    "gdpo": _BY_CREDIT,
    "gigpo": ("single_session", "turn_gamma", "gigpo_weight", "gigpo_std"),
    "reinforce_plus_plus": ("gamma", "credit"),
    "reinforce_plus_plus_baseline": _BY_CREDIT,
    "remax": ("credit",),
    "optimal_token_baseline": ("single_session", "credit"),
    "tir_optimal_token_baseline": ("single_session", "credit"),
}
"""The settings that each value of `algorithm.advantage` uses; with another estimator they have no effect."""


class OptimizerSection(Section):
    """The settings that actor and critic share."""

    mini_batch_size: NonNegative = 0
    """Prompts per optimizer step (each counts group_size sessions). 0: the whole batch."""
    epochs: Positive = 1
    """Passes over the batch per step."""
    ranks: ProcessCount = 1
    """Worker processes that share the model (FSDP2 when more than one)."""
    context_parallel: ProcessCount = 1
    """Ranks that compute each row together, for rows that are longer than one GPU can take."""
    micro_batch_tokens: Positive = 16_384
    """Most tokens in one forward and backward of a rank."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    beta1: Fraction = 0.9
    """AdamW's first moment decay."""
    beta2: Fraction = 0.999
    """AdamW's second moment decay."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient norm. 0 turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over the steps of the run, after warm-up."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate of linear and cosine schedules, as a share of lr."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class ActorSection(OptimizerSection):
    lr: PositiveFloat = 1e-6
    """Learning rate."""


class CriticSection(OptimizerSection):
    lr: PositiveFloat = 1e-5
    """Learning rate."""
    path: str = ""
    """Folder or hub name of the critic's model. Empty: model.path, with a fresh value head."""
    value_clip: NonNegativeFloat = 0.5
    """Largest change of a value that the value loss counts. 0 turns clipping off."""
    warmup_only_steps: NonNegative = 0
    """Number of steps at the start in which only the critic learns."""


class ReferenceSection(Section):
    path: str = ""
    """Folder or hub name of the frozen reference. Empty: the initial model (LoRA: the actor without adapter)."""
    ranks: ProcessCount = 1
    """Worker processes that share the reference."""
    context_parallel: ProcessCount = 1
    """Ranks that compute each row together, for rows that are longer than one GPU can take."""
    micro_batch_tokens: Positive = 32_768
    """Most tokens in one forward of a rank."""


class RewardSection(Section):
    function: str | list[str] = ""
    """Built-in name or `file.py:function`, or several. Empty: the task's own, or `exact_match` for files."""
    weights: list[float] = []
    """Weights of several functions, such as `[1.0, 0.2]`: the reward is the weighted sum. Empty: 1 each."""
    function_args: dict[str, Any] = {}
    """Keyword arguments for the function; with several functions a table for each, by its name."""
    workers: NonNegative = 0
    """ProcessCount that score. 0: built-in functions run where the trajectory is made, others in one process."""
    timeout_s: PositiveFloat = 30.0
    """Longest time to score one sample."""
    on_error: Literal["error", "zero", "drop_group"] = "error"
    """When the function raises or takes too long: stop, score 0, or drop the whole group."""
    overlong_buffer: NonNegative = 0
    """DAPO's soft limit: number of tokens before max_new_tokens that are penalised. 0 turns it off."""
    overlong_factor: NonNegativeFloat = 1.0
    """Penalty at max_new_tokens."""


class RewardModelSection(Section):
    path: str = ""
    """A sequence-classification model that scores trajectories. Empty: none."""
    ranks: ProcessCount = 1
    """Worker processes that share the reward model."""
    context_parallel: ProcessCount = 1
    """Ranks that compute each row together, for rows that are longer than one GPU can take."""
    weight: float = 1.0
    """The score is multiplied by this and added to the reward function's."""
    micro_batch_tokens: Positive = 32_768
    """Most tokens in one forward of a rank."""


class TeacherSection(Section):
    path: str
    """Folder or hub name of the teacher. `student`: the student at its start; `task:NAME`: a tiny model made for it."""
    match: list[str] = []
    """Values of distillation.route_by that this teacher scores. Empty: all, for a single teacher only."""
    prompt: str = ""
    """What the teacher is asked instead, with {prompt}, {answer} and columns filled in. Empty: the prompt itself."""
    backend: str = "embedded"
    """Engine that scores: embedded, vllm or sglang."""
    replicas: ProcessCount = 1
    """Engine processes of this teacher."""
    tensor_parallel: GpusPerEngine = 1
    """GPUs per replica."""
    max_context_tokens: NonNegative = 0
    """Longest sequence that the teacher scores. 0: the student's prompt and response, plus one token."""
    python: str = ""
    """Interpreter of the engine's own environment."""
    endpoints: list[str] = []
    """Attach to servers that already run."""
    memory_fraction: Fraction = 0.8
    """Share of a GPU's memory for the engine."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest time until the teacher's replicas are ready."""
    max_restarts: NonNegative = 3
    """Restarts of an engine that died, per replica."""
    engine_args: dict[str, Any] = {}
    """Further arguments of the engine, as in rollout.engine_args."""


class DistillationSection(Section):
    loss: Literal["k1", "abs", "k2", "k3", "forward_kl_topk", "reverse_kl_topk", "forward_kl", "reverse_kl"] = "k3"
    """Divergence between student and teacher, per response token."""
    top_k: Positive = 32
    """Tokens of the teacher's distribution that the top-k losses compare."""
    update: Literal["supervised", "policy_gradient"] = "supervised"
    """Backpropagate the divergence, or use its negative as an advantage."""
    task_reward: bool = False
    """Add the policy loss of the task's reward."""
    coef: PositiveFloat = 1.0
    """Weight of the distillation loss when it is added to the task's."""
    loss_max: NonNegativeFloat = 0.0
    """Clamp of the divergence per token. 0 turns it off."""
    logprob_min: Annotated[float, Field(le=0)] = 0.0
    """Lower clamp of log-probabilities before the divergence. 0 turns it off."""
    route_by: str = "data_source"
    """Column of the dataset that chooses the teacher."""
    nodes: ProcessCount = 1
    """Nodes of the teacher pool."""
    gpus_per_node: GpusPerNode = 0
    """GPUs per node of the teacher pool; 0 where teachers run on CPUs."""
    check_vocabulary: bool = True
    """Refuse a teacher whose tokenizer differs from the student's."""
    mask_special: bool = True
    """Leave special tokens out of the loss, except the one that ends an answer."""
    batch_rows: Positive = 32
    """Rows that a teacher scores in one call, about. Calls are made while other rows are still being sampled."""
    cache_gb: NonNegativeFloat = 1.0
    """Most disk space for each teacher's scores in the run's folder, in GiB. 0 turns the cache off."""
    on_teacher_failure: Literal["error", "drop"] = "error"
    """When a teacher does not answer: stop, or drop the groups that it would have scored."""
    timeout_s: PositiveFloat = 120.0
    """Longest time for a teacher to score one call's rows."""
    retries: NonNegative = 2
    """Further attempts of a call that failed."""


class ValidationSection(Section):
    data: str | list[str] = ""
    """Held-out prompts, written like data.train. Empty: the procedural task's held-out part, or none for files."""
    interval: NonNegative = 0
    """Steps between validations; 0: only before training and at the end."""
    before_train: bool = True
    """Validate before the first step."""
    num_prompts: Positive = 256
    """Prompts per validation."""
    samples: Positive = 1
    """Sampled answers per prompt, for mean@k, best@k and maj@k. A greedy answer is always taken too."""
    temperature: PositiveFloat = 1.0
    """Temperature of the sampled answers."""


class CheckpointSection(Section):
    interval: NonNegative = 0
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Checkpoints at multiples of this step count are never deleted. 0: none."""
    save_on_exit: bool = True
    """Save at the end and after the first Ctrl-C or SIGTERM."""
    background: bool = False
    """Write while training goes on, from a copy of weights and optimizer state in the nodes' memory. One checkpoint at
    a time; it exists once a later step finds every rank's part written."""
    on_full_disk: Literal["stop", "continue"] = "stop"
    """When the disk is full: end the run, or go on without what does not fit. Earlier checkpoints stay."""
    export: bool = True
    """Write the final weights as a Hugging Face folder, export/hf."""


class LoggingSection(Section):
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Further destinations of the metrics, besides metrics.jsonl."""
    project: str = "tqppo"
    """Project name for wandb."""
    trajectories: NonNegative = 0
    """Steps between two that write their trajectories. 0: never."""


class ClusterSection(Section):
    address: str = ""
    """Ray cluster to join (`auto` or `host:port`). Empty: a private Ray on this machine."""
    nodes: ProcessCount = 1
    """Nodes that the trainer's roles use."""
    gpus_per_node: GpusPerNode = 0
    """GPUs per node for actor, critic, reference and engines. 0: CPU only."""
    gpu_memory_gb: NonNegativeFloat = 0.0
    """GiB of memory of one GPU, which the plan is compared with. 0: as this machine's driver says, if it has any."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPUs that Ray counts for one worker process."""
    colocate: bool = True
    """Roles and engines share the node's GPUs, taking turns; off: each has its own."""
    shard_within_nodes: bool = False
    """Each node holds a whole copy of every role's weights and optimizer state, sharded over its ranks (HSDP); off: all
    ranks share one copy. On, nodes exchange gradients only, and each GPU holds more."""
    in_process: bool = False
    """All roles and the engine run in the command's own process, without Ray and with the same results: the fastest
    start for small models on CPUs, and a debugger reaches everything. `train --in-process` sets it."""


class Config(Section):
    """All settings of a run."""

    mode: ModeName = "grpo"
    """What to train with."""
    run: RunSection = RunSection()
    """Name, folder, seed and length of the run."""
    model: ModelSection = ModelSection()
    """The model that learns."""
    warm_start: WarmStartSection = WarmStartSection()
    """A short supervised start."""
    data: DataSection = DataSection()
    """Prompts."""
    rollout: RolloutSection = RolloutSection()
    """Engines and sampling."""
    storage: StorageSection = StorageSection()
    """The transfer queue's storage."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantages, losses, KL."""
    actor: ActorSection = ActorSection()
    """The policy's training."""
    critic: CriticSection = CriticSection()
    """The value function's training, in modes with a critic."""
    reference: ReferenceSection = ReferenceSection()
    """The frozen policy that KL is measured against."""
    reward: RewardSection = RewardSection()
    """The reward function."""
    reward_model: RewardModelSection = RewardModelSection()
    """A model that scores trajectories."""
    teachers: dict[str, TeacherSection] = {}
    """Frozen models for distillation, by name."""
    distillation: DistillationSection = DistillationSection()
    """On-policy distillation, in modes with teachers."""
    validation: ValidationSection = ValidationSection()
    """Held-out evaluation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saving and exporting."""
    logging: LoggingSection = LoggingSection()
    """Metrics and trajectories."""
    cluster: ClusterSection = ClusterSection()
    """Ray and devices."""

    @model_validator(mode="before")
    @classmethod
    def _advantage_of_mode(cls, values: Any) -> Any:
        """Each mode has its own default estimator: PPO has a critic, so its advantages are GAE's."""
        if not isinstance(values, dict) or values.get("mode") not in dataflow.mode_names():
            return values
        default = dataflow.mode_named(values["mode"]).advantage
        algorithm = values.get("algorithm", {})
        if isinstance(algorithm, AlgorithmSection):
            written = algorithm.model_fields_set
            algorithm = {name: getattr(algorithm, name) for name in written}
        return {**values, "algorithm": {"advantage": default, **algorithm}} if isinstance(algorithm, dict) else values
