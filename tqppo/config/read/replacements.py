"""Keys of other tools and of older examples, each with the key of tqppo that replaces it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replacement:
    """`tool` is where the key comes from, `key` what to use instead (empty: nothing), `hint` how to use it."""

    tool: str
    key: str
    hint: str = ""


REMOVED = "removed"
STANDALONE = (
    "teachers always have a pool of their own; delete this key and set distillation.nodes and "
    "distillation.gpus_per_node"
)

# Full dotted names or endings of them; `replacement_of` takes the longest that matches. `teacher` stands for the table
# of any teacher.
REPLACEMENTS: dict[str, Replacement] = {
    # distillation, as older examples write it
    "enable_resource_pool": Replacement(REMOVED, "distillation.nodes", STANDALONE),
    "teacher_model": Replacement(REMOVED, "teachers", "each teacher is a table of its own: [teachers.NAME] path = …"),
    "teacher_models": Replacement("verl", "teachers", "each teacher is a table of its own: [teachers.NAME] path = …"),
    "distillation.teachers": Replacement(
        REMOVED, "teachers", "teachers are top-level tables: [teachers.NAME] path = …"
    ),
    "distillation.num_workers": Replacement(
        REMOVED, "teachers", "scoring runs on the teachers' engines: set replicas in [teachers.NAME]"
    ),
    "distillation.colocate": Replacement(REMOVED, "distillation.nodes", STANDALONE),
    "distillation.share_gpus": Replacement(REMOVED, "distillation.nodes", STANDALONE),
    "teacher.colocate": Replacement(REMOVED, "distillation.nodes", STANDALONE),
    "teacher.enable_sleep_mode": Replacement(REMOVED, "", "teachers never sleep: delete this key"),
    "teacher.free_cache_engine": Replacement(REMOVED, "", "teachers never sleep: delete this key"),
    "teacher.temperature": Replacement(REMOVED, "", "teachers always score at temperature 1: delete this key"),
    "teacher.key": Replacement("verl", "teachers.*.match", "a list of values of distillation.route_by"),
    "teacher.model_path": Replacement("verl", "teachers.*.path"),
    "teacher.num_replicas": Replacement("verl", "teachers.*.replicas"),
    "teacher.tensor_model_parallel_size": Replacement("verl", "teachers.*.tensor_parallel"),
    "teacher.gpu_memory_utilization": Replacement("verl", "teachers.*.memory_fraction"),
    "teacher.max_model_len": Replacement("verl", "teachers.*.max_context_tokens"),
    "distillation.enabled": Replacement("verl", "mode", 'write mode = "distill" at the top'),
    "distillation.nnodes": Replacement("verl", "distillation.nodes"),
    "distillation.n_gpus_per_node": Replacement("verl", "distillation.gpus_per_node"),
    "distillation.teacher_key": Replacement("verl", "distillation.route_by"),
    "distillation_loss.loss_mode": Replacement("verl", "distillation.loss"),
    "distillation_loss.topk": Replacement("verl", "distillation.top_k"),
    "distillation_loss.use_task_rewards": Replacement("verl", "distillation.task_reward"),
    "distillation_loss.use_policy_gradient": Replacement(
        "verl", "distillation.update", 'write update = "policy_gradient" or "supervised"'
    ),
    "distillation_loss.distillation_loss_coef": Replacement("verl", "distillation.coef"),
    "distillation_loss.use_chunked_topk": Replacement(
        "verl", "", "top-k losses are always computed in chunks; delete this key"
    ),
    "distillation_loss.chunked_topk_chunk_size": Replacement(
        "verl", "", "top-k losses are always computed in chunks; delete this key"
    ),
    "distillation_loss.loss_max_clamp": Replacement("verl", "distillation.loss_max"),
    "distillation_loss.log_prob_min_clamp": Replacement("verl", "distillation.logprob_min"),
    # verl
    "rollout.n": Replacement("verl", "rollout.group_size"),
    "rollout.name": Replacement("verl", "rollout.backend"),
    "rollout.tensor_model_parallel_size": Replacement("verl", "rollout.tensor_parallel"),
    "rollout.gpu_memory_utilization": Replacement("verl", "rollout.memory_fraction"),
    "rollout.max_num_seqs": Replacement("verl", "rollout.max_running"),
    "rollout.max_model_len": Replacement("verl", "rollout.max_context_tokens"),
    "rollout.response_length": Replacement("verl", "rollout.max_new_tokens"),
    "rollout.calculate_log_probs": Replacement("verl", "", "engines always return log-probabilities; delete this key"),
    "agent.num_workers": Replacement(
        "verl", "rollout.replicas", "agent loops are coroutines; engines scale by replicas"
    ),
    "agent.default_agent_loop": Replacement("verl", "rollout.agent"),
    "actor_rollout_ref.model.path": Replacement("verl", "model.path"),
    "model.lora_r": Replacement("TRL", "model.lora_rank"),
    "model.enable_gradient_checkpointing": Replacement("verl", "actor.gradient_checkpointing"),
    "optim.lr": Replacement("verl", "actor.lr"),
    "critic.optim.lr": Replacement("verl", "critic.lr"),
    "optim.weight_decay": Replacement("verl", "actor.weight_decay"),
    "optim.lr_warmup_steps": Replacement("verl", "actor.warmup_steps"),
    "critic.ppo_mini_batch_size": Replacement("verl", "critic.mini_batch_size"),
    "ppo_mini_batch_size": Replacement("verl", "actor.mini_batch_size", "counted in prompts, as in verl"),
    "ppo_micro_batch_size": Replacement(
        "verl", "actor.micro_batch_tokens", "micro-batches are cut by tokens, not by rows"
    ),
    "ppo_micro_batch_size_per_gpu": Replacement(
        "verl", "actor.micro_batch_tokens", "micro-batches are cut by tokens, not by rows"
    ),
    "ppo_max_token_len_per_gpu": Replacement("verl", "actor.micro_batch_tokens"),
    "use_dynamic_bsz": Replacement(
        "verl", "", "micro-batches are always cut by tokens (micro_batch_tokens); delete it"
    ),
    "log_prob_micro_batch_size_per_gpu": Replacement("verl", "reference.micro_batch_tokens"),
    "ppo_epochs": Replacement("verl", "actor.epochs"),
    "clip_ratio": Replacement("verl", "algorithm.clip_low", "set clip_low and clip_high"),
    "clip_ratio_low": Replacement("verl", "algorithm.clip_low"),
    "clip_ratio_high": Replacement("verl", "algorithm.clip_high"),
    "clip_ratio_c": Replacement("verl", "algorithm.clip_dual"),
    "loss_agg_mode": Replacement("verl", "algorithm.aggregate"),
    "entropy_coeff": Replacement("verl", "algorithm.entropy_coef"),
    "use_kl_loss": Replacement("verl", "algorithm.kl_loss", 'write kl_loss = "k3" (or "none") and kl_loss_coef'),
    "kl_loss_type": Replacement("verl", "algorithm.kl_loss", "k1, abs, k2, k3; low_var_kl is k3, kl is k1, mse is k2"),
    "actor.kl_loss_coef": Replacement("verl", "algorithm.kl_loss_coef"),
    "use_kl_in_reward": Replacement("verl", "algorithm.kl_reward", 'write kl_reward = "k1" and kl_reward_coef'),
    "kl_penalty": Replacement("verl", "algorithm.kl_reward"),
    "kl_ctrl.type": Replacement("verl", "algorithm.kl_controller"),
    "kl_ctrl.kl_coef": Replacement("verl", "algorithm.kl_reward_coef"),
    "kl_ctrl.target_kl": Replacement("verl", "algorithm.kl_target"),
    "kl_ctrl.horizon": Replacement("verl", "algorithm.kl_horizon"),
    "adv_estimator": Replacement("verl", "algorithm.advantage"),
    "policy_loss.loss_mode": Replacement("verl", "algorithm.loss"),
    "norm_adv_by_std_in_grpo": Replacement("verl", "algorithm.advantage", 'false is advantage = "dr_grpo"'),
    "filter_groups.enable": Replacement("verl", "algorithm.filter_groups"),
    "cliprange_value": Replacement("verl", "critic.value_clip"),
    "trainer.critic_warmup": Replacement("verl", "critic.warmup_only_steps", "k means k steps here, k − 1 in verl"),
    "data.train_files": Replacement("verl", "data.train"),
    "data.val_files": Replacement("verl", "validation.data"),
    "train_batch_size": Replacement("verl", "data.batch_size"),
    "data.max_prompt_length": Replacement("verl", "data.max_prompt_tokens"),
    "data.max_response_length": Replacement("verl", "rollout.max_new_tokens"),
    "data.truncation": Replacement("verl", "data.overlong", '"error", "drop" or "truncate"'),
    "data.filter_overlong_prompts": Replacement("verl", "data.overlong", 'write overlong = "drop"'),
    "custom_reward_function.path": Replacement("verl", "reward.function", 'write "file.py:function"'),
    "custom_reward_function.name": Replacement("verl", "reward.function", 'write "file.py:function"'),
    "trainer.total_training_steps": Replacement("verl", "run.max_steps"),
    "trainer.total_epochs": Replacement("verl", "run.max_steps", "runs are counted in steps, not epochs"),
    "trainer.experiment_name": Replacement("verl", "run.name"),
    "trainer.project_name": Replacement("verl", "logging.project"),
    "trainer.logger": Replacement("verl", "logging.trackers"),
    "trainer.save_freq": Replacement("verl", "checkpoint.interval"),
    "trainer.test_freq": Replacement("verl", "validation.interval"),
    "trainer.val_before_train": Replacement("verl", "validation.before_train"),
    "trainer.nnodes": Replacement("verl", "cluster.nodes"),
    "trainer.n_gpus_per_node": Replacement("verl", "cluster.gpus_per_node"),
    "trainer.default_local_dir": Replacement("verl", "run.dir"),
    "trainer.resume_mode": Replacement("verl", "", "resuming is a command: tqppo resume RUN"),
    "trainer.balance_batch": Replacement("verl", "", "batches are always balanced over the ranks; delete this key"),
    # TRL
    "num_generations": Replacement("TRL", "rollout.group_size"),
    "max_completion_length": Replacement("TRL", "rollout.max_new_tokens"),
    "max_prompt_length": Replacement("TRL", "data.max_prompt_tokens"),
    "learning_rate": Replacement("TRL", "actor.lr"),
    "per_device_train_batch_size": Replacement(
        "TRL", "data.batch_size", "counted in prompts per step, over all devices"
    ),
    "gradient_accumulation_steps": Replacement(
        "TRL", "actor.mini_batch_size", "prompts per optimizer step; micro-batches follow from micro_batch_tokens"
    ),
    "generation_batch_size": Replacement("TRL", "data.batch_size", "counted in prompts; group_size multiplies it"),
    "num_iterations": Replacement("TRL", "actor.epochs"),
    "num_train_epochs": Replacement("TRL", "run.max_steps", "runs are counted in steps, not epochs"),
    "beta": Replacement("TRL", "algorithm.kl_loss_coef", 'with kl_loss = "k3"'),
    "epsilon": Replacement("TRL", "algorithm.clip_low", "set clip_low and clip_high"),
    "epsilon_high": Replacement("TRL", "algorithm.clip_high"),
    "loss_type": Replacement("TRL", "algorithm.aggregate", "dapo is token-mean, grpo is seq-mean-token-mean"),
    "scale_rewards": Replacement("TRL", "algorithm.advantage", 'false is advantage = "dr_grpo"'),
    "importance_sampling_level": Replacement("TRL", "algorithm.loss", '"sequence" is loss = "gspo"'),
    "use_vllm": Replacement("TRL", "rollout.backend", 'write backend = "vllm"'),
    "vllm_server_base_url": Replacement("TRL", "rollout.endpoints"),
    "vllm_gpu_memory_utilization": Replacement("TRL", "rollout.memory_fraction"),
    "reward_funcs": Replacement("TRL", "reward.function"),
    "model_name_or_path": Replacement("TRL", "model.path"),
    "dataset_name": Replacement("TRL", "data.train"),
    "output_dir": Replacement("TRL", "run.dir"),
    "run_name": Replacement("TRL", "run.name"),
    "save_steps": Replacement("TRL", "checkpoint.interval"),
    "save_total_limit": Replacement("TRL", "checkpoint.keep_last"),
    "eval_steps": Replacement("TRL", "validation.interval"),
    "report_to": Replacement("TRL", "logging.trackers"),
    "warmup_steps": Replacement("TRL", "actor.warmup_steps"),
    "lr_scheduler_type": Replacement("TRL", "actor.schedule"),
    "max_grad_norm": Replacement("TRL", "actor.grad_clip"),
    "bf16": Replacement("TRL", "model.dtype", 'write dtype = "bfloat16"'),
    # prime-rl
    "rollouts_per_example": Replacement("prime-rl", "rollout.group_size"),
    "orchestrator.batch_size": Replacement("prime-rl", "data.batch_size", "counted in prompts, not in rollouts"),
    "orchestrator.seq_len": Replacement("prime-rl", "rollout.max_context_tokens"),
    "sampling.max_tokens": Replacement("prime-rl", "rollout.max_new_tokens"),
    "sampling.temperature": Replacement("prime-rl", "rollout.temperature"),
    "trainer.optim.lr": Replacement("prime-rl", "actor.lr"),
    "optim.max_norm": Replacement("prime-rl", "actor.grad_clip"),
    "trainer.model.name": Replacement("prime-rl", "model.path"),
    "model.name": Replacement("prime-rl", "model.path"),
    "ckpt.interval": Replacement("prime-rl", "checkpoint.interval"),
    "ckpt.keep": Replacement("prime-rl", "checkpoint.keep_last"),
    "inference.parallel.tp": Replacement("prime-rl", "rollout.tensor_parallel"),
    "max_off_policy_steps": Replacement(
        "prime-rl", "", "steps are synchronous: every batch is on-policy; delete this key"
    ),
    "wandb.project": Replacement("prime-rl", "logging.project"),
    # other spellings
    "max_tokens": Replacement("OpenAI's API", "rollout.max_new_tokens"),
    "steps": Replacement("another tool", "run.max_steps"),
    "random_seed": Replacement("another tool", "run.seed"),
}


def replacement_of(path: tuple[str, ...]) -> Replacement | None:
    """The replacement of a key, or of a table above it: the longest known ending decides."""
    names = [part.replace("-", "_") for part in path]
    if names[0] == "teachers" and len(names) > 2:
        names[:2] = ["teacher"]
    for end in range(len(names), 0, -1):
        for start in range(end):
            known = REPLACEMENTS.get(".".join(names[start:end]))
            if known is not None:
                return known
    return None
