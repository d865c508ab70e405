"""The pieces that a run is built from and that need no process."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.errors import DataError, PreflightError
from tqppo.run import build
from tqppo.run.configure import RunPaths
from tqppo.run.folder import RunFolder
from tqppo.tiny.tokenizer import byte_tokenizer
from tqppo.weights import location


def config_of(*overrides: str) -> Config:
    return compile_config("quickstart", [], list(overrides), {}).draft


def test_trajectories_are_written_every_so_many_steps(tmp_path: Path) -> None:
    schedule = build.trajectory_schedule(config_of("logging.trajectories=5"), RunFolder(tmp_path))
    assert [step for step in range(1, 12) if schedule(step)] == [5, 10]
    assert build.trajectory_schedule(config_of(), RunFolder(tmp_path))(5) is None


def test_a_tokenizer_that_is_not_there_says_what_a_model_path_is(tmp_path: Path) -> None:
    paths = RunPaths("nowhere", str(tmp_path / "nowhere"), tmp_path, "")
    with pytest.raises(PreflightError, match=r"cannot be loaded: (.|\n)*model\.path is a folder"):
        build.load_tokenizer(config_of(), paths)


def test_only_a_tiny_model_that_is_soon_made_is_made_ahead(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    build.make_ahead(config_of(f"warm_start.steps={build.QUICK_STEPS + 1}"), folder)
    build.make_ahead(config_of('model.path="some/model"', "warm_start.steps=0"), folder)
    assert list(tmp_path.iterdir()) == []
    config = config_of("warm_start.steps=1", "model.hidden_size=16")
    build.make_ahead(config, folder)
    made = (folder.model / "model.safetensors").stat().st_mtime_ns
    build.prepare_model(config, folder.model)
    assert (folder.model / "model.safetensors").stat().st_mtime_ns == made


def test_validation_takes_the_held_out_part_of_a_task() -> None:
    prompts = build.validation_prompts(config_of("validation.num_prompts=7"), byte_tokenizer())
    assert len(prompts) == 7
    assert build.eos_tokens(byte_tokenizer()) == (byte_tokenizer().eos_token_id,)


def test_an_overlong_prompt_is_found_before_training(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "short", "answer": "1"}\n' + f'{{"prompt": "{"long " * 50}", "answer": "2"}}\n')
    config = config_of(
        f'data.train="{data}"', "data.answer_key=answer", "data.overlong=error", "data.max_prompt_tokens=64"
    )
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens"):
        build.make_sampler(config, byte_tokenizer(), nullcontext)


def test_the_size_of_published_weights_follows_from_the_shape_or_the_files(tmp_path: Path) -> None:
    assert build.model_bytes(compile_config("grpo-7b", environ={}).draft, "") == pytest.approx(15.2e9, rel=0.01)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert build.model_bytes(config_of(f'model.path="{tmp_path}"'), str(tmp_path)) == 100


def test_the_folder_of_published_weights_is_gone_when_the_run_ends() -> None:
    with ExitStack() as stack:
        folder = Path(build.publish_folder(stack))
        folder.mkdir()
        assert folder.name.startswith(location.PREFIX)
    assert not folder.exists()
