"""Names that users of other tools, or of older examples, will try first, and what replaces them here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """A key from elsewhere. `here` is our key (empty when there is none), `why` what to know about it."""

    origin: str
    here: str
    why: str = ""


_REMOVED = "removed"

# Full dotted names, or their endings: the longest ending of what the user wrote decides.
FOREIGN: dict[str, Foreign] = {
    # distillation, as older examples write it
    "enable_resource_pool": Foreign(
        _REMOVED,
        "distillation.nodes",
        "teachers always have a pool of their own; delete this key and set distillation.nodes and "
        "distillation.gpus_per_node",
    ),
    "teacher_model": Foreign(_REMOVED, "teachers", "each teacher is a table of its own: [teachers.NAME] path = …"),
    "teacher_models": Foreign("verl", "teachers", "each teacher is a table of its own: [teachers.NAME] path = …"),
    "distillation.teachers": Foreign(_REMOVED, "teachers", "teachers are top-level tables: [teachers.NAME] path = …"),
    "distillation.num_workers": Foreign(
        _REMOVED, "teachers", "scoring runs on the teachers' engines: set replicas in [teachers.NAME]"
    ),
    "distillation.enabled": Foreign("verl", "mode", 'write mode = "distill" at the top'),
    "distillation.nnodes": Foreign("verl", "distillation.nodes"),
    "distillation.n_gpus_per_node": Foreign("verl", "distillation.gpus_per_node"),
    "distillation.teacher_key": Foreign("verl", "distillation.route_by"),
    "distillation_loss.loss_mode": Foreign("verl", "distillation.loss"),
    "distillation_loss.topk": Foreign("verl", "distillation.top_k"),
    "distillation_loss.use_task_rewards": Foreign("verl", "distillation.task_reward"),
    "distillation_loss.use_policy_gradient": Foreign(
        "verl", "distillation.update", 'write update = "policy_gradient" or "supervised"'
    ),
    "distillation_loss.distillation_loss_coef": Foreign("verl", "distillation.coef"),
    "distillation_loss.loss_max_clamp": Foreign("verl", "distillation.loss_max"),
    "distillation_loss.log_prob_min_clamp": Foreign("verl", "distillation.logprob_min"),
    # verl
    "rollout.n": Foreign("verl", "rollout.group_size"),
    "rollout.name": Foreign("verl", "rollout.backend"),
    "rollout.tensor_model_parallel_size": Foreign("verl", "rollout.tensor_parallel"),
    "rollout.gpu_memory_utilization": Foreign("verl", "rollout.memory_fraction"),
    "rollout.max_num_seqs": Foreign("verl", "rollout.max_running"),
    "rollout.max_model_len": Foreign("verl", "rollout.max_context_tokens"),
    "rollout.response_length": Foreign("verl", "rollout.max_new_tokens"),
    "rollout.calculate_log_probs": Foreign("verl", "", "engines always return log-probabilities; delete this key"),
    "agent.num_workers": Foreign("verl", "rollout.replicas", "agent loops are coroutines; engines scale by replicas"),
    "agent.default_agent_loop": Foreign("verl", "rollout.agent"),
    "actor_rollout_ref.model.path": Foreign("verl", "model.path"),
    "model.lora_r": Foreign("TRL", "model.lora_rank"),
    "model.enable_gradient_checkpointing": Foreign("verl", "actor.gradient_checkpointing"),
    "optim.lr": Foreign("verl", "actor.lr"),
    "critic.optim.lr": Foreign("verl", "critic.lr"),
    "optim.weight_decay": Foreign("verl", "actor.weight_decay"),
    "optim.lr_warmup_steps": Foreign("verl", "actor.warmup_steps"),
    "critic.ppo_mini_batch_size": Foreign("verl", "critic.mini_batch_size"),
    "ppo_mini_batch_size": Foreign("verl", "actor.mini_batch_size", "counted in prompts, as in verl"),
    "ppo_micro_batch_size": Foreign("verl", "actor.micro_batch_tokens", "micro-batches are cut by tokens, not by rows"),
    "ppo_micro_batch_size_per_gpu": Foreign(
        "verl", "actor.micro_batch_tokens", "micro-batches are cut by tokens, not by rows"
    ),
    "ppo_max_token_len_per_gpu": Foreign("verl", "actor.micro_batch_tokens"),
    "use_dynamic_bsz": Foreign("verl", "", "micro-batches are always cut by tokens (micro_batch_tokens); delete it"),
    "log_prob_micro_batch_size_per_gpu": Foreign("verl", "reference.micro_batch_tokens"),
    "ppo_epochs": Foreign("verl", "actor.epochs"),
    "clip_ratio": Foreign("verl", "algorithm.clip_low", "set clip_low and clip_high"),
    "clip_ratio_low": Foreign("verl", "algorithm.clip_low"),
    "clip_ratio_high": Foreign("verl", "algorithm.clip_high"),
    "clip_ratio_c": Foreign("verl", "algorithm.clip_dual"),
    "loss_agg_mode": Foreign("verl", "algorithm.aggregate"),
    "entropy_coeff": Foreign("verl", "algorithm.entropy_coef"),
    "use_kl_loss": Foreign("verl", "algorithm.kl_loss", 'write kl_loss = "k3" (or "none") and kl_loss_coef'),
    "kl_loss_type": Foreign("verl", "algorithm.kl_loss", "k1, abs, k2, k3; low_var_kl is k3, kl is k1, mse is k2"),
    "actor.kl_loss_coef": Foreign("verl", "algorithm.kl_loss_coef"),
    "use_kl_in_reward": Foreign("verl", "algorithm.kl_reward", 'write kl_reward = "k1" and kl_reward_coef'),
    "kl_penalty": Foreign("verl", "algorithm.kl_reward"),
    "kl_ctrl.type": Foreign("verl", "algorithm.kl_controller"),
    "kl_ctrl.kl_coef": Foreign("verl", "algorithm.kl_reward_coef"),
    "kl_ctrl.target_kl": Foreign("verl", "algorithm.kl_target"),
    "kl_ctrl.horizon": Foreign("verl", "algorithm.kl_horizon"),
    "adv_estimator": Foreign("verl", "algorithm.advantage"),
    "policy_loss.loss_mode": Foreign("verl", "algorithm.loss"),
    "norm_adv_by_std_in_grpo": Foreign("verl", "algorithm.advantage", 'false is advantage = "dr_grpo"'),
    "filter_groups.enable": Foreign("verl", "algorithm.filter_groups"),
    "cliprange_value": Foreign("verl", "critic.value_clip"),
    "trainer.critic_warmup": Foreign("verl", "critic.warmup_only_steps", "k means k steps here (k − 1 in verl)"),
    "data.train_files": Foreign("verl", "data.train"),
    "data.val_files": Foreign("verl", "validation.data"),
    "train_batch_size": Foreign("verl", "data.batch_size"),
    "data.max_prompt_length": Foreign("verl", "data.max_prompt_tokens"),
    "data.max_response_length": Foreign("verl", "rollout.max_new_tokens"),
    "data.truncation": Foreign("verl", "data.overlong", '"error", "drop" or "truncate"'),
    "data.filter_overlong_prompts": Foreign("verl", "data.overlong", 'write overlong = "drop"'),
    "custom_reward_function.path": Foreign("verl", "reward.function", 'write "file.py:function"'),
    "custom_reward_function.name": Foreign("verl", "reward.function", 'write "file.py:function"'),
    "trainer.total_training_steps": Foreign("verl", "run.max_steps"),
    "trainer.total_epochs": Foreign("verl", "run.max_steps", "runs are counted in steps, not epochs"),
    "trainer.experiment_name": Foreign("verl", "run.name"),
    "trainer.project_name": Foreign("verl", "logging.project"),
    "trainer.logger": Foreign("verl", "logging.trackers"),
    "trainer.save_freq": Foreign("verl", "checkpoint.interval"),
    "trainer.test_freq": Foreign("verl", "validation.interval"),
    "trainer.val_before_train": Foreign("verl", "validation.before_train"),
    "trainer.nnodes": Foreign("verl", "cluster.nodes"),
    "trainer.n_gpus_per_node": Foreign("verl", "cluster.gpus_per_node"),
    "trainer.default_local_dir": Foreign("verl", "run.dir"),
    "trainer.resume_mode": Foreign("verl", "", "resuming is a command: tqppo resume RUN"),
    "trainer.balance_batch": Foreign("verl", "", "batches are always balanced over the ranks; delete this key"),
    # TRL
    "num_generations": Foreign("TRL", "rollout.group_size"),
    "max_completion_length": Foreign("TRL", "rollout.max_new_tokens"),
    "max_prompt_length": Foreign("TRL", "data.max_prompt_tokens"),
    "learning_rate": Foreign("TRL", "actor.lr"),
    "per_device_train_batch_size": Foreign("TRL", "data.batch_size", "counted in prompts per step, over all devices"),
    "gradient_accumulation_steps": Foreign(
        "TRL", "actor.mini_batch_size", "prompts per optimizer step; micro-batches follow from micro_batch_tokens"
    ),
    "generation_batch_size": Foreign("TRL", "data.batch_size", "counted in prompts; group_size multiplies it"),
    "num_iterations": Foreign("TRL", "actor.epochs"),
    "num_train_epochs": Foreign("TRL", "run.max_steps", "runs are counted in steps, not epochs"),
    "beta": Foreign("TRL", "algorithm.kl_loss_coef", 'with kl_loss = "k3"'),
    "epsilon": Foreign("TRL", "algorithm.clip_low", "set clip_low and clip_high"),
    "epsilon_high": Foreign("TRL", "algorithm.clip_high"),
    "loss_type": Foreign("TRL", "algorithm.aggregate", "dapo is token-mean, grpo is seq-mean-token-mean"),
    "scale_rewards": Foreign("TRL", "algorithm.advantage", 'false is advantage = "dr_grpo"'),
    "importance_sampling_level": Foreign("TRL", "algorithm.loss", '"sequence" is loss = "gspo"'),
    "use_vllm": Foreign("TRL", "rollout.backend", 'write backend = "vllm"'),
    "vllm_server_base_url": Foreign("TRL", "rollout.endpoints"),
    "vllm_gpu_memory_utilization": Foreign("TRL", "rollout.memory_fraction"),
    "reward_funcs": Foreign("TRL", "reward.function"),
    "model_name_or_path": Foreign("TRL", "model.path"),
    "dataset_name": Foreign("TRL", "data.train"),
    "output_dir": Foreign("TRL", "run.dir"),
    "run_name": Foreign("TRL", "run.name"),
    "save_steps": Foreign("TRL", "checkpoint.interval"),
    "save_total_limit": Foreign("TRL", "checkpoint.keep_last"),
    "eval_steps": Foreign("TRL", "validation.interval"),
    "report_to": Foreign("TRL", "logging.trackers"),
    "warmup_steps": Foreign("TRL", "actor.warmup_steps"),
    "lr_scheduler_type": Foreign("TRL", "actor.schedule"),
    "max_grad_norm": Foreign("TRL", "actor.grad_clip"),
    "bf16": Foreign("TRL", "model.dtype", 'write dtype = "bfloat16"'),
    # prime-rl
    "rollouts_per_example": Foreign("prime-rl", "rollout.group_size"),
    "orchestrator.batch_size": Foreign("prime-rl", "data.batch_size", "counted in prompts, not in rollouts"),
    "orchestrator.seq_len": Foreign("prime-rl", "rollout.max_context_tokens"),
    "sampling.max_tokens": Foreign("prime-rl", "rollout.max_new_tokens"),
    "sampling.temperature": Foreign("prime-rl", "rollout.temperature"),
    "trainer.optim.lr": Foreign("prime-rl", "actor.lr"),
    "optim.max_norm": Foreign("prime-rl", "actor.grad_clip"),
    "trainer.model.name": Foreign("prime-rl", "model.path"),
    "model.name": Foreign("prime-rl", "model.path"),
    "ckpt.interval": Foreign("prime-rl", "checkpoint.interval"),
    "ckpt.keep": Foreign("prime-rl", "checkpoint.keep_last"),
    "inference.parallel.tp": Foreign("prime-rl", "rollout.tensor_parallel"),
    "max_off_policy_steps": Foreign("prime-rl", "", "steps are synchronous: every batch is on-policy; delete this key"),
    "wandb.project": Foreign("prime-rl", "logging.project"),
    # other spellings
    "max_tokens": Foreign("OpenAI's API", "rollout.max_new_tokens"),
    "steps": Foreign("another tool", "run.max_steps"),
    "random_seed": Foreign("another tool", "run.seed"),
}


def foreign(path: tuple[str, ...]) -> Foreign | None:
    """What a key of another tool is called here: the longest known ending, of the key or of a table above it."""
    names = [part.replace("-", "_") for part in path]
    for end in range(len(names), 0, -1):
        for start in range(end):
            known = FOREIGN.get(".".join(names[start:end]))
            if known is not None:
                return known
    return None
