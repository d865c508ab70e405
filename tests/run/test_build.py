"""The parts of a run that need no process: model, tokenizer, prompts, files."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.errors import PreflightError
from tqppo.run import build
from tqppo.run.configure import RunPaths
from tqppo.run.folder import RunFolder


def compiled(*sets: str) -> Config:
    config = compile_config("quickstart", [], sets, {}).config
    assert config is not None
    return config


def paths(tokenizer: str) -> RunPaths:
    return RunPaths(tokenizer, tokenizer, Path("logs"), "")


def test_a_model_that_exists_is_used_as_it_is(tmp_path: Path) -> None:
    assert build.prepare_model(compiled("model.path=some/model"), tmp_path) == "some/model"


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="/nowhere/model"):
        build.load_tokenizer(compiled(), paths("/nowhere/model"))


def test_training_and_validation_prompts_differ(tiny_model: Path) -> None:
    config = compiled("validation.num_prompts=8")
    tokenizer = build.load_tokenizer(config, paths(str(tiny_model)))
    assert build.eos_tokens(tokenizer) == (tokenizer.eos_token_id,)
    held_out = build.validation_prompts(config, tokenizer)
    assert len(held_out) == 8
    training = build.make_sampler(config, tokenizer, lambda what: nullcontext()).next_batch(8)
    assert not {tuple(each.tokens) for each in held_out} & {tuple(each.tokens) for each in training}


def test_trajectories_are_written_every_so_many_steps(tmp_path: Path) -> None:
    schedule = build.trajectory_schedule(compiled("logging.trajectories=5"), RunFolder(tmp_path))
    assert schedule(4) is None
    assert schedule(10) == tmp_path / "trajectories" / "step_000010.jsonl"
    assert build.trajectory_schedule(compiled("logging.trajectories=0"), RunFolder(tmp_path))(10) is None


def test_the_folder_of_published_weights_goes_with_the_run() -> None:
    with ExitStack() as stack:
        folder = Path(build.publish_folder(stack))
        (folder / "version-1").mkdir(parents=True)
    assert not folder.exists()
