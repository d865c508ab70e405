"""Builds a run's parts from its config and takes them down again, in reverse order. Imported only to train.

Everything that takes long starts together and is waited for at the end.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer

from tqppo.algorithms.kl import Controller
from tqppo.algorithms.padding import required_multiple
from tqppo.config.sections import Config
from tqppo.data.dataset import is_procedural
from tqppo.data.prompts import DataSpec, Prompt, Sampler, demonstrations, for_validation
from tqppo.data.prompts import load as load_prompts
from tqppo.errors import PreflightError
from tqppo.queue.client import Queue
from tqppo.ray_calls import results
from tqppo.rollout.assignment import Assignment
from tqppo.rollout.pool import RolloutPool
from tqppo.run import configure as specs
from tqppo.run.configure import Places
from tqppo.run.folder import RunFolder
from tqppo.run.parts import Parts, Validator
from tqppo.run.placement import demands, needs_reference, roles, shares
from tqppo.run.resources import check_resources
from tqppo.trainers.groups import Replay
from tqppo.trainers.grpo import GrpoTrainer
from tqppo.trainers.ppo import PpoTrainer
from tqppo.trainers.stages import Absent, Advantages, Clock, Learner, Padding, Rollout, Stages, Timed
from tqppo.weights import location
from tqppo.weights.verify import Probe
from tqppo.workers.actor import Actor
from tqppo.workers.critic import Critic
from tqppo.workers.estimator import Estimator
from tqppo.workers.process.group import WorkerGroup
from tqppo.workers.reference import Reference
from tqppo.workers.reward_model import RewardModel

Announce = Callable[[str], AbstractContextManager[None]]  # shows the user what takes time
PROBE_TOKENS = 32
START_TIMEOUT_S = 600.0
TOLERANCE = {"float32": 1e-3}  # of log-probabilities after a weight sync; smaller types round more


def build(config: Config, folder: RunFolder, logs: Path, stack: ExitStack, announce: Announce) -> Parts:
    """Everything started and ready; what was started is taken down when `stack` closes."""
    check_resources(demands(config), ray.cluster_resources())
    with announce("making the model" if config.model.path == "tiny" else "finding the model"):
        model = prepare_model(config, folder.model)
    places = Places(model, config.model.tokenizer or model, logs, publish_folder(stack))
    tokenizer = load_tokenizer(config, places)
    queue = make_queue(config, stack)
    groups = start_groups(config, places, queue, stack)
    pool = start_pool(config, places, queue, tokenizer, stack)
    estimator: Any = ray.remote(Estimator).options(num_cpus=0).remote(specs.estimator_spec(config, places), queue)
    sampler = make_sampler(config, tokenizer, announce)
    clock = Clock()
    validator = Validator(pool, queue, clock, validation_prompts(config, tokenizer), validation_task(config))
    with announce("loading the model into its workers"):
        for group in groups.values():
            group.ready()
        results([estimator.__ray_ready__.remote()], START_TIMEOUT_S, "starting the estimator")
    with announce(f"starting the {config.rollout.backend} engine"):
        pool.ready()
    rollout = make_rollout(config, queue, pool, sampler, clock)
    if config.rollout.verify_weights and config.rollout.backend != "embedded":
        rollout.probe = probe_of(config, groups["actor"], len(tokenizer))
    learning = learners(config, groups, clock)
    stages = Stages(
        queue=queue,
        rollout=rollout,
        reward_model=Timed(groups["reward_model"], clock, score="reward") if "reward_model" in groups else Absent(),
        padding=Padding(queue, clock, multiple=row_multiple(config, learning)),
        actor=learning["actor"],
        old_policy=learning["actor"] if config.algorithm.old_logprobs == "recompute" else Absent(),
        reference=reference_stage(config, groups, learning["actor"], clock),
        advantages=Advantages(
            estimator,
            clock,
            kl_controller(config),
            timeout_s=config.storage.timeout_s + 60,
            dump_to=dump_schedule(config, folder),
        ),
        clock=clock,
    )
    return Parts(queue, pool, groups, stages, make_trainer(config, stages, learning), sampler, validator)


# -- the model ---------------------------------------------------------------------------------------------------------


def prepare_model(config: Config, folder: Path) -> str:
    """The model's folder or hub name; a tiny model is made, and warmed up, in a process of its own."""
    model, warm = config.model, config.warm_start
    if model.path != "tiny":
        return model.path
    shape = {
        "family": model.family,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "tie_embeddings": model.tie_embeddings,
    }
    arguments = {"steps": warm.steps, "batch_size": warm.batch_size, "lr": warm.lr, "seed": config.run.seed}
    task = ray.remote(num_cpus=0)(make_tiny_model)
    return ray.get(task.remote(str(folder.resolve()), shape, DataSpec.of(config.data), arguments))


def make_tiny_model(folder: str, shape: dict[str, Any], data: DataSpec, arguments: dict[str, Any]) -> str:
    import torch

    from tqppo.tiny.warm_start import prepare

    torch.set_num_threads(1)
    shown = demonstrations(data, seed=arguments["seed"])
    return str(prepare(folder, model=shape, demonstrations=shown, **arguments))


def load_tokenizer(config: Config, places: Places) -> Any:
    try:
        return AutoTokenizer.from_pretrained(places.tokenizer, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(
            f"the tokenizer of {places.tokenizer!r} cannot be loaded: {reason}\n"
            "model.path is a folder in Hugging Face's layout, a hub name (which needs the network), or tiny"
        ) from None


def eos_tokens(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


# -- processes ---------------------------------------------------------------------------------------------------------


def make_queue(config: Config, stack: ExitStack) -> Queue:
    storage = config.storage
    queue = Queue.create(
        storage.backend, budget_bytes=int(storage.budget_gb * 2**30), timeout_s=storage.timeout_s, dir=storage.dir
    )
    stack.callback(queue.close)
    return queue


def start_groups(config: Config, places: Places, queue: Queue, stack: ExitStack) -> dict[str, WorkerGroup]:
    classes = {"actor": Actor, "critic": Critic, "reference": Reference, "reward_model": RewardModel}
    share, groups = shares(config), {}
    for role, ranks in roles(config).items():
        if role not in classes:
            continue
        spec = specs.role_spec(config, places, role)
        group = WorkerGroup(role, classes[role], ranks=ranks, spec=spec, queue=queue, cpus=share.cpus, gpus=share.gpus)
        stack.callback(group.close)
        group.start()
        groups[role] = group
    return groups


def start_pool(config: Config, places: Places, queue: Queue, tokenizer: Any, stack: ExitStack) -> RolloutPool:
    pool = RolloutPool(
        specs.rollout_spec(config, places, eos_tokens(tokenizer)),
        queue,
        endpoints=config.rollout.endpoints,
        replicas=config.rollout.replicas,
        timeout_s=config.rollout.timeout_s,
    )
    stack.callback(pool.close)
    share = shares(config)
    pool.start(cpus=share.cpus, gpus=share.engine_gpus)
    return pool


def publish_folder(stack: ExitStack) -> str:
    """Where the actor publishes weights; the folders of dead runs are removed first."""
    location.remove_abandoned()
    folder = location.new_folder()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


# -- stages ------------------------------------------------------------------------------------------------------------


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
    """What a batch is padded to: every rank and every mini-batch gets as many rows as the others."""
    ranks = math.lcm(*(roles(config)[role] for role in learning))
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


def reference_stage(config: Config, groups: dict[str, WorkerGroup], actor: Learner, clock: Clock) -> Any:
    """A model of its own, the actor with its adapter off, or nothing."""
    if not needs_reference(config):
        return Absent()
    return Timed(groups["reference"], clock, logprobs="ref") if "reference" in groups else AdapterOff(actor)


@dataclass(frozen=True)
class AdapterOff:
    actor: Learner

    def logprobs(self, batch: Any) -> Any:
        return self.actor.reference_logprobs(batch)


def kl_controller(config: Config) -> Controller:
    algorithm = config.algorithm
    target = algorithm.kl_target if algorithm.kl_controller == "adaptive" else None
    return Controller(algorithm.kl_reward_coef, target, algorithm.kl_horizon)


def probe_of(config: Config, actor: WorkerGroup, vocabulary: int) -> Callable[[], Probe]:
    """After each weight sync: what the trainer says of one fixed sequence, for the engine to agree with."""
    length = min(PROBE_TOKENS, specs.context_tokens(config))
    tokens = [(7 * i * i + 3 * i + config.run.seed) % vocabulary for i in range(length)]
    tolerance = TOLERANCE["float32"] if config.model.dtype in ("auto", "float32") else 0.1
    return lambda: Probe(tokens, actor.probe(tokens), tolerance)


def dump_schedule(config: Config, folder: RunFolder) -> Callable[[int], Path | None]:
    every = config.logging.trajectories
    return lambda step: folder.trajectories / f"step_{step:06d}.jsonl" if every and step % every == 0 else None


def make_sampler(config: Config, tokenizer: Any, announce: Announce) -> Sampler:
    """The training prompts. Files are read through once: an overlong prompt is found now, not at step 700."""
    prompts = load_prompts(DataSpec.of(config.data), tokenizer, seed=config.run.seed)
    train = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    if config.data.overlong == "error" and not all(is_procedural(each) for each in train):
        with announce("checking the prompts"):
            prompts.check()
    return Sampler(prompts)


# -- validation --------------------------------------------------------------------------------------------------------


def validation_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    data, sources = DataSpec.of(config.data), config.validation.data
    held_out = for_validation(data, tokenizer, seed=config.run.seed, sources=sources)
    return held_out.first(config.validation.num_prompts) if held_out else []


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
