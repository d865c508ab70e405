"""Each mode's step as a list of calls, on fakes that keep rows in a real queue."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainers.fakes import FakeEstimator, fake_run

from tqppo import columns, dataflow, plugins
from tqppo.errors import OutOfSpace
from tqppo.metrics.events import Event, NothingToTrain, TrajectoriesNotWritten
from tqppo.queue.client import Queue
from tqppo.queue.meta import BatchMeta
from tqppo.trainers import distill, ppo

SMALL = ("data.batch_size=2", "rollout.group_size=2")
TOOLS = 'rollout.agent_args.tools=["tqppo.data.lookup:f"]'
REWRITES = ("rollout.agent=rewrite", TOOLS, "rollout.max_trajectories=3")
TWICE = "actor.epochs=2"  # the second update changes a policy that is no longer the one that sampled
TAUGHT = (*SMALL, "mode=distill", "teachers.t.path=t", "distillation.loss=reverse_kl_topk")


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue.create("simple", local=True, budget_bytes=64 << 20)
    yield queue
    queue.close()


def test_a_grpo_step_is_this_list_of_calls(queue: Queue) -> None:
    run = fake_run(queue, None, *SMALL, TWICE)
    run.trainer.step(1)
    assert run.log.calls == [
        "rollout.generate",
        "actor.old_logprobs",
        "advantages.estimate",
        "actor.update",
        "actor.publish",
        "load version 1",
    ]
    assert len(queue.list()) == 0


def test_a_ppo_step_with_everything_is_this_list_of_calls(queue: Queue) -> None:
    extras = ("reward_model.path=rm", "algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.1")
    run = fake_run(queue, None, "mode=ppo", *SMALL, TWICE, *extras)
    run.trainer.step(1)
    assert run.log.calls == [
        "rollout.generate",
        "reward_model.score",
        "actor.old_logprobs",
        "reference.logprobs",
        "critic.values",
        "advantages.estimate",
        "critic.update",
        "actor.update",
        "actor.publish",
        "load version 1",
    ]
    assert len(queue.list()) == 0


def test_a_distillation_step_computes_nothing_that_only_ppo_needs(queue: Queue) -> None:
    run = fake_run(queue, None, *TAUGHT)
    assert isinstance(run.trainer, distill.DistillTrainer)
    metrics = run.trainer.step(1)
    assert run.log.calls == ["rollout.generate", "actor.update", "actor.publish", "load version 1"]
    assert run.log.reads["actor.update"] == (
        *("tokens", "response_mask", "teacher_ids", "teacher_logprobs", "teacher_index"),
    )
    assert metrics["critic/score/mean"] == 0.5
    assert (metrics["teacher/t/requests"], metrics["teacher/t/rows"]) == (1.0, 4.0)
    assert len(queue.list()) == 0


def test_a_distillation_step_with_rewards_and_a_reference_is_this_list_of_calls(queue: Queue) -> None:
    kl = ("algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.1")
    run = fake_run(queue, None, *TAUGHT, "distillation.task_reward=true", "reward_model.path=rm", *kl)
    run.trainer.step(1)
    assert run.log.calls == [
        "rollout.generate",
        "reward_model.score",
        "actor.old_logprobs",
        "reference.logprobs",
        "advantages.estimate",
        "actor.update",
        "actor.publish",
        "load version 1",
    ]
    assert len(queue.list()) == 0


def test_a_policy_gradient_needs_the_old_policy_and_may_be_corrected(queue: Queue) -> None:
    gradient = ("distillation.loss=k1", "distillation.update=policy_gradient")
    run = fake_run(queue, None, *TAUGHT, *gradient)
    run.trainer.step(1)
    assert run.log.calls[:3] == ["rollout.generate", "actor.old_logprobs", "actor.update"]
    corrected = fake_run(queue, None, *TAUGHT, *gradient, "algorithm.correction=token")
    corrected.trainer.step(1)
    assert corrected.log.writes["advantages.estimate"] == ("correction_weights",)
    assert "correction_weights" in corrected.log.reads["actor.update"]


def test_hidden_states_of_teachers_are_padded_like_any_column(queue: Queue) -> None:
    odd = ("data.batch_size=3", "rollout.group_size=2", "actor.mini_batch_size=2")
    run = fake_run(queue, None, *TAUGHT, *odd, "distillation.loss=forward_kl")
    metrics = run.trainer.step(1)
    assert metrics["padding/rows"] == 2.0
    assert "teacher_hidden" in run.log.reads["actor.update"]


def test_while_only_the_critic_learns_engines_get_no_weights(queue: Queue) -> None:
    run = fake_run(queue, None, "mode=ppo", *SMALL, "critic.warmup_only_steps=2")
    for step in (1, 2, 3):
        run.trainer.step(step)
    assert run.log.calls.count("critic.update") == 3
    assert [call for call in run.log.calls if call in ("actor.update", "load version 3")] == [
        "actor.update",
        "load version 3",
    ]


@pytest.mark.parametrize(
    ("settings", "is_stage"),
    [
        ([], False),
        (["actor.mini_batch_size=2"], False),
        (["actor.mini_batch_size=1"], True),
        ([TWICE], True),
        # A batch may have more rows than the mini-batch.
        (["actor.mini_batch_size=2", *REWRITES], True),
        (["algorithm.correction=token"], True),
        (["algorithm.reject=token"], True),
        (["algorithm.kl_reward=k1", "algorithm.kl_reward_coef=0.1"], True),
    ],
)
def test_one_update_per_step_computes_the_old_log_probabilities_itself(
    queue: Queue, settings: list[str], is_stage: bool
) -> None:
    run = fake_run(queue, None, *SMALL, *settings)
    run.trainer.step(1)
    assert ("actor.old_logprobs" in run.log.calls) == is_stage
    assert ("old_logprobs" in run.log.reads["actor.update"]) == is_stage
    assert ("rollout_logprobs" in run.log.reads["actor.update"]) != is_stage


def test_the_engines_log_probabilities_save_a_stage(queue: Queue) -> None:
    run = fake_run(queue, None, *SMALL, "algorithm.old_logprobs=rollout")
    run.trainer.step(1)
    assert "actor.old_logprobs" not in run.log.calls
    assert "rollout_logprobs" in run.log.reads["actor.update"]


def test_a_batch_is_padded_and_cut_into_equal_mini_batches(queue: Queue) -> None:
    run = fake_run(queue, None, "data.batch_size=3", "rollout.group_size=2", "actor.mini_batch_size=2")
    metrics = run.trainer.step(1)
    assert (metrics["padding/rows"], metrics["padding/multiple"]) == (2.0, 4.0)
    assert metrics["actor/mini_batches"] == 2.0


def test_a_step_whose_mini_batches_have_nothing_to_train_says_so(queue: Queue) -> None:
    events: list[Event] = []
    run = fake_run(queue, None, *SMALL, report=events.append)
    run.actor.metrics = {"padding/all_padding": 2.0}
    run.trainer.step(3)
    assert events == [NothingToTrain(3, "actor", 2)]


def test_with_lora_the_reference_is_the_actor_unless_a_path_is_set(queue: Queue) -> None:
    kl = ("model.lora_rank=4", "algorithm.kl_loss=k3", "algorithm.kl_loss_coef=0.1")
    run = fake_run(queue, None, *SMALL, *kl)
    run.trainer.step(1)
    assert "reference" not in run.roles
    assert "reference.logprobs" in run.log.calls
    own = fake_run(queue, None, *SMALL, *kl, "reference.path=base")
    own.trainer.step(1)
    assert own.roles["reference"] == 1


def test_beta_follows_the_penalty_from_step_to_step(queue: Queue) -> None:
    adaptive = ("algorithm.kl_reward=k1", "algorithm.kl_reward_coef=0.1", "algorithm.kl_controller=adaptive")
    run = fake_run(queue, None, *SMALL, *adaptive)
    metrics = run.trainer.step(1)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert run.trainer.step(2)["actor/reward_kl_penalty_coeff"] > 0.1


def test_trajectories_are_written_when_the_schedule_says_so(queue: Queue) -> None:
    schedule = {2: Path("step_000002.jsonl")}
    run = fake_run(queue, None, *SMALL, trajectories=schedule.get)
    run.trainer.step(1)
    assert not any(call.startswith("write") for call in run.log.calls)
    run.trainer.step(2)
    assert "write step_000002.jsonl" in run.log.calls


class FullDisk(FakeEstimator):
    def write_trajectories(self, batch: BatchMeta, path: Path) -> None:
        raise OutOfSpace("no room for 7 bytes")


def test_trajectories_without_room_end_the_run_or_are_reported_and_left_out(queue: Queue) -> None:
    for policy in ("stop", "continue"):
        reported: list[Event] = []
        run = fake_run(
            queue,
            None,
            *SMALL,
            f"checkpoint.on_full_disk={policy}",
            trajectories=lambda step: Path("x.jsonl"),
            report=reported.append,
        )
        run.stages.advantages.estimator = FullDisk(queue, run.stages.advantages.features, run.log)
        if policy == "stop":
            with pytest.raises(OutOfSpace, match="the trajectories of step 1 were not written: no room for 7 bytes"):
                run.trainer.step(1)
            queue.clear(queue.list())
        else:
            run.trainer.step(1)
            assert reported == [TrajectoriesNotWritten(1, "no room for 7 bytes")]
            assert "training goes on: no room for 7 bytes" in reported[0].notice


def test_every_stage_of_a_step_is_timed_once(queue: Queue) -> None:
    run = fake_run(queue, None, "mode=ppo", *SMALL, TWICE)
    run.trainer.step(1)
    assert list(run.clock.take()) == [
        f"timing_s/{name}"
        for name in ("gen", "old_log_prob", "values", "adv", "update_critic", "update_actor", "update_weights")
    ]


def step_lines(mode: dataflow.Mode) -> list[tuple[str, str]]:
    """Each call `self.stage.method(…)` of a step, in order, with the comment on its line and right below."""
    source = textwrap.dedent(inspect.getsource(plugins.import_object(mode.trainer).step))
    comments: dict[int, str] = {}
    for number, line in enumerate(source.splitlines(), start=1):
        code, _, comment = line.partition("#")
        place = number if code.strip() else max(comments)
        comments[place] = comments.get(place, "") + comment
    calls = [
        (node.lineno, node.col_offset, f"{node.func.value.attr}.{node.func.attr}")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Attribute)
    ]
    return [(name, comments[line]) for line, _, name in sorted(calls)]


OPTIONAL = {
    "turn_ends",
    "turn_rewards",
    "turn_anchors",
    "baseline_reward",
    "sum_pi_squared",
    "loss_mask",
    "correction_weights",
    "session_weight",
}
TEACHERS = {"teacher_ids", "teacher_logprobs", "teacher_hidden", "teacher_index"}
TRAINED = list(dataflow.MODES.values())


@pytest.mark.parametrize("mode", TRAINED, ids=lambda mode: mode.name)
def test_a_step_calls_the_stages_that_its_mode_declares_in_that_order(mode: dataflow.Mode) -> None:
    declared = [stage.name for stage in mode.stages]
    assert [name for name, _ in step_lines(mode) if name in declared] == declared


@pytest.mark.parametrize("mode", TRAINED, ids=lambda mode: mode.name)
def test_the_comments_of_a_step_name_the_columns_that_its_stages_add(mode: dataflow.Mode) -> None:
    stages = {stage.name: stage for stage in mode.stages}
    possible = set(stages["advantages.estimate"].writes_when) - ({"returns"} if not mode.has_critic else set())
    for name, comment in step_lines(mode):
        named = set(re.findall(r"\w+", comment)) & set(columns.declared())
        if name not in stages:
            assert not comment.strip().startswith("+"), f"{name} is no stage and its comment names columns: {comment}"
            continue
        added = possible if name == "advantages.estimate" else set(stages[name].writes_when)
        assert named == added - OPTIONAL - (set() if mode.has_teachers else TEACHERS), name


@pytest.mark.slow
def test_a_misspelt_call_in_a_step_is_a_type_error(tmp_path: Path) -> None:
    source = Path(inspect.getfile(ppo)).read_text()
    misspelt = {
        "self.actor.old_logprobs(batch)": "self.actor.old_logprob(batch)",
        "self.critic.update(batch, step)": "self.critic.update(batch, steps=step)",
        "self.critic.values(batch)": "self.critic.values(step)",
    }
    for index, (right, wrong) in enumerate(misspelt.items()):
        assert right in source
        (tmp_path / f"misspelt_{index}.py").write_text(source.replace(right, wrong))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--ignore-missing-imports", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False).stdout
    assert '"ActorStage" has no attribute "old_logprob"' in found
    assert 'Unexpected keyword argument "steps"' in found
    assert 'Argument 1 to "values" of "CriticStage" has incompatible type "int"' in found
