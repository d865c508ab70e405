"""Builds a run's parts from its config and takes them down again, in reverse order. Imported only to train.

Everything that takes long starts together; `ready` waits for all of it.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer

from tqppo import specs, validation
from tqppo.algorithms.kl import Controller
from tqppo.algorithms.padding import required_multiple
from tqppo.config.sections import Config
from tqppo.prompts import DataSpec, Prompt, Sampler, demonstrations
from tqppo.prompts import load as load_prompts
from tqppo.queue.client import Queue
from tqppo.queue.replay import Replay
from tqppo.rollout.pool import RolloutPool
from tqppo.rollout.worker import Assignment
from tqppo.specs import Places
from tqppo.trainers.grpo import GrpoTrainer
from tqppo.trainers.ppo import PpoTrainer
from tqppo.trainers.stages import Absent, Advantages, Clock, Learner, Padding, Rollout, Stages, Timed
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.estimator import Estimator
from tqppo.workers.group import WorkerGroup
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel

Stage = Callable[[str], AbstractContextManager[None]]  # shows the user what takes time
PUBLISH_PREFIX = "tqppo-weights-"


@dataclass
class Parts:
    """A run, built and ready."""

    queue: Queue
    pool: RolloutPool
    groups: dict[str, WorkerGroup]  # by role: actor, and of critic, reference, reward_model what the run has
    stages: Stages
    trainer: GrpoTrainer | PpoTrainer
    sampler: Sampler
    validator: Validator

    def load(self, folder: Path) -> None:
        """The learners' state from a checkpoint."""
        for role in ("actor", "critic"):
            if role in self.groups:
                self.groups[role].load(str(folder / role))
        self.queue.restore(folder / "queue")

    def save(self, folder: Path) -> None:
        for role in ("actor", "critic"):
            if role in self.groups:
                self.groups[role].save(str(folder / role))
        self.queue.snapshot(folder / "queue")

    def driver_state(self) -> dict[str, Any]:
        return {"data": self.sampler.state(), "kl_coef": self.stages.advantages.controller.coef}

    def validate(self, step: int) -> dict[str, float]:
        return self.validator.run() | ({} if step else self.stages.clock.take())

    def leftovers(self) -> list[str]:
        """Keys still in the queue: none, after a step."""
        return list(self.queue.list().keys)

    def measure(self, metrics: dict[str, float]) -> dict[str, float]:
        """The step's metrics, with what the driver knows: timings, throughput, counts, reward extras."""
        stages = self.stages
        found = {**stages.advantages.metrics, **metrics, **stages.padding.metrics, **stages.rollout.metrics}
        found |= self.sampler.metrics() | stages.clock.take()
        tokens, seconds = stages.rollout.num_tokens, sum(v for k, v in found.items() if k.startswith("timing_s/"))
        found |= {"timing_s/step": seconds, "perf/time_per_step": seconds, "perf/total_num_tokens": float(tokens)}
        found["perf/throughput"] = tokens / seconds if seconds else 0.0
        return found

    def restore_driver(self, state: dict[str, Any]) -> None:
        self.sampler.restore(state["data"])
        advantages = self.stages.advantages
        advantages.controller = replace(advantages.controller, coef=state["kl_coef"])


class Validator:
    """Held-out prompts, sampled and greedy; the same random numbers every time, so that steps compare."""

    def __init__(self, pool: RolloutPool, queue: Queue, clock: Clock, prompts: list[Prompt], task: Assignment) -> None:
        self.pool = pool
        self.queue = queue
        self.clock = clock
        self.prompts = prompts
        self.task = task

    def run(self) -> dict[str, float]:
        if not self.prompts:
            return {}
        with self.clock.time("testing"):
            self.pool.generate(list(enumerate(self.prompts)), self.task)
            found = self.queue.list(self.task.partition)
            self.queue.clear(found)
            answers = [
                validation.Answer(
                    prompt=tags["uid"],
                    source=tags["source"],
                    score=tags["reward"],
                    metrics=tags.get("extra", {}),
                    prediction=tags["answer"],
                    is_greedy=tags["session"] == self.task.group_size,
                )
                for tags in found.in_order().tags
                if "uid" in tags and tags["last"]
            ]
            return validation.figures(answers)


def build(config: Config, model_folder: Path, logs: Path, stack: ExitStack, stage: Stage) -> Parts:
    """Everything started and ready; what was started is taken down when `stack` closes."""
    publish = publish_folder(stack)
    with stage("making the model" if config.model.path == "tiny" else "finding the model"):
        model = prepare_model(config, model_folder)
    places = Places(model, config.model.tokenizer or model, logs, publish)
    queue = Queue.create(
        config.storage.backend,
        budget_bytes=int(config.storage.budget_gb * 2**30),
        timeout_s=config.storage.timeout_s,
        dir=config.storage.dir,
    )
    stack.callback(queue.close)
    groups = start_groups(config, places, queue, stack)
    estimator = ray.remote(Estimator).options(num_cpus=0).remote(specs.estimator_spec(config), queue)
    tokenizer = AutoTokenizer.from_pretrained(places.tokenizer, trust_remote_code=config.model.trust_remote_code)
    pool = RolloutPool(
        specs.rollout_spec(config, places, eos_tokens(tokenizer)),
        queue,
        endpoints=config.rollout.endpoints,
        replicas=config.rollout.replicas,
        timeout_s=config.rollout.timeout_s,
    )
    stack.callback(pool.close)
    pool.start(cpus=share_of_cpu(config), gpus=engine_gpus(config))
    sampler = Sampler(load_prompts(DataSpec.of(config.data), tokenizer, seed=config.run.seed))
    clock = Clock()
    validator = Validator(pool, queue, clock, validation_prompts(config, tokenizer), validation_task(config))
    with stage("loading the model into its workers"):
        for group in groups.values():
            group.ready()
    with stage(f"starting the {config.rollout.backend} engine"):
        pool.ready()
    learning = learners(config, groups, clock)
    stages = Stages(
        queue=queue,
        rollout=make_rollout(config, queue, pool, sampler, clock),
        reward_model=Timed(groups["reward_model"], clock, score="reward") if "reward_model" in groups else Absent(),
        padding=Padding(queue, clock, multiple=row_multiple(config, learning)),
        actor=learning["actor"],
        old_policy=learning["actor"] if config.algorithm.old_logprobs == "recompute" else Absent(),
        reference=reference_stage(config, groups, learning["actor"], clock),
        advantages=Advantages(estimator, clock, kl_controller(config), timeout_s=config.storage.timeout_s),
        clock=clock,
    )
    return Parts(queue, pool, groups, stages, make_trainer(config, stages, learning), sampler, validator)


def prepare_model(config: Config, folder: Path) -> str:
    """The model's folder or hub name; a tiny model is made, and warmed up, in a process of its own."""
    if config.model.path != "tiny":
        return config.model.path
    model, warm = config.model, config.warm_start
    shape = {
        "family": model.family,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "tie_embeddings": model.tie_embeddings,
    }
    data = DataSpec.of(config.data)
    task = ray.remote(num_cpus=0)(make_tiny_model)
    arguments = {"steps": warm.steps, "batch_size": warm.batch_size, "lr": warm.lr, "seed": config.run.seed}
    return ray.get(task.remote(str(folder.resolve()), shape, data, arguments))


def make_tiny_model(folder: str, shape: dict[str, Any], data: DataSpec, arguments: dict[str, Any]) -> str:
    import torch

    from tqppo.workers.warm_start import prepare

    torch.set_num_threads(1)
    shown = demonstrations(data, seed=arguments["seed"])
    return str(prepare(folder, model=shape, demonstrations=shown, **arguments))


def start_groups(config: Config, places: Places, queue: Queue, stack: ExitStack) -> dict[str, WorkerGroup]:
    wanted: dict[str, tuple[type, int, Any]] = {"actor": (Actor, config.actor.ranks, specs.actor_spec(config, places))}
    if config.mode == "ppo":
        wanted["critic"] = (Critic, config.critic.ranks, specs.critic_spec(config, places))
    if specs.needs_reference(config) and not config.model.lora_rank:
        wanted["reference"] = (Reference, config.reference.ranks, specs.reference_spec(config, places))
    if config.reward_model.path:
        wanted["reward_model"] = (RewardModel, config.reward_model.ranks, specs.reward_model_spec(config))
    groups = {}
    for role, (worker, ranks, spec) in wanted.items():
        group = WorkerGroup(role, worker, spec=spec, ranks=ranks, queue=queue, cpus=share_of_cpu(config))
        stack.callback(group.close)
        group.start()
        groups[role] = group
    return groups


def learners(config: Config, groups: dict[str, WorkerGroup], clock: Clock) -> dict[str, Learner]:
    sections = {"actor": config.actor, "critic": config.critic}
    return {
        role: Learner(
            groups[role],
            clock,
            timed_as=f"update_{role}",
            mini_batch_rows=section.mini_batch_size * config.rollout.group_size,
            logprobs="old_log_prob",
            reference_logprobs="ref",
            values="values",
        )
        for role, section in sections.items()
        if role in groups
    }


def row_multiple(config: Config, learning: dict[str, Learner]) -> int:
    sections = {"actor": config.actor, "critic": config.critic}
    ranks = math.lcm(*(sections[role].ranks for role in learning))
    return required_multiple(ranks, [learner.mini_batch_rows for learner in learning.values()])


def make_trainer(config: Config, stages: Stages, learning: dict[str, Learner]) -> GrpoTrainer | PpoTrainer:
    if config.mode == "ppo":
        return PpoTrainer(stages, learning["critic"], critic_only_steps=config.critic.warmup_only_steps)
    return GrpoTrainer(stages)


def make_rollout(config: Config, queue: Queue, pool: RolloutPool, sampler: Sampler, clock: Clock) -> Rollout:
    algorithm = config.algorithm
    replay = Replay(
        queue,
        sampler.next_batch,
        on_incomplete=config.rollout.on_incomplete_group,
        filter_groups=algorithm.filter_groups,
        max_rounds=algorithm.filter_max_rounds,
    )
    task = Assignment(
        seed=config.run.seed,
        step=0,
        group_size=config.rollout.group_size,
        sampling=specs.sampling(config),
        greedy=algorithm.advantage == "remax",
    )
    return Rollout(pool, replay, clock, assignment=task, num_prompts=config.data.batch_size)


def kl_controller(config: Config) -> Controller:
    algorithm = config.algorithm
    target = algorithm.kl_target if algorithm.kl_controller == "adaptive" else None
    return Controller(algorithm.kl_reward_coef, target, algorithm.kl_horizon)


def reference_stage(config: Config, groups: dict[str, WorkerGroup], actor: Learner, clock: Clock) -> Any:
    """A model of its own, the actor with its adapter off, or nothing."""
    if not specs.needs_reference(config):
        return Absent()
    if "reference" in groups:
        return Timed(groups["reference"], clock, logprobs="ref")
    return AdapterOff(actor)


@dataclass(frozen=True)
class AdapterOff:
    actor: Learner

    def logprobs(self, batch: Any) -> Any:
        return self.actor.reference_logprobs(batch)


def validation_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    sources = config.validation.data
    if not sources and not all(str(each).startswith(("task:", "gym:")) for each in as_list(config.data.train)):
        return []
    held_out = load_prompts(
        DataSpec.of(config.data), tokenizer, seed=config.run.seed, held_out=True, sources=sources, prefix="v"
    )
    return held_out.first(config.validation.num_prompts)


def validation_task(config: Config) -> Assignment:
    return Assignment(
        seed=config.run.seed,
        step=0,
        group_size=config.validation.samples,
        sampling=specs.sampling(config, temperature=config.validation.temperature),
        partition="val",
        greedy=True,
        keep_tensors=False,
    )


def eos_tokens(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def share_of_cpu(config: Config) -> float:
    """Roles that take turns share a CPU; Ray must not wait for one each."""
    return config.cluster.cpus_per_worker / 8 if config.cluster.colocate else config.cluster.cpus_per_worker


def engine_gpus(config: Config) -> float:
    if not config.cluster.gpus_per_node:
        return 0.0
    return config.rollout.memory_fraction if config.cluster.colocate else float(config.rollout.tensor_parallel)


def publish_folder(stack: ExitStack) -> str:
    """Where the actor publishes weights: shared memory, named after this process so that a dead run's can be told."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    for left in root.glob(f"{PUBLISH_PREFIX}*"):
        owner = left.name[len(PUBLISH_PREFIX) :].split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = root / f"{PUBLISH_PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)
