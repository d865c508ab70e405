"""Room for weights and checkpoints is asked for before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.sections import Config
from tqppo.errors import PreflightError
from tqppo.run.room import Room, check_room, checkpoint_bytes, model_bytes

PLENTY = 10**15


def config_of(*overrides: str, preset: str = "quickstart") -> Config:
    return compile_config(preset, [], list(overrides), {}).draft


def test_sizes_follow_from_the_shape_or_from_the_files(tmp_path: Path) -> None:
    assert model_bytes(config_of(preset="grpo-7b"), "") == pytest.approx(15.2e9, rel=0.01)
    assert checkpoint_bytes(config_of(preset="ppo-7b")) == pytest.approx(2 * 12 * 7.6e9, rel=0.01)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert model_bytes(config_of(f'model.path="{tmp_path}"'), str(tmp_path)) == 100
    assert checkpoint_bytes(config_of("checkpoint.interval=0", "checkpoint.save_on_exit=false")) == 0


def test_enough_room_passes(tmp_path: Path) -> None:
    check_room(config_of(), "", tmp_path)


def test_a_disk_without_room_for_a_checkpoint_is_named_unless_the_run_may_go_on(tmp_path: Path) -> None:
    small = Room(disk=lambda folder: 10, memory=lambda: PLENTY)
    with pytest.raises(PreflightError, match=rf"a checkpoint needs .*{tmp_path} has 10 B free"):
        check_room(config_of(), "", tmp_path, small)
    check_room(config_of("checkpoint.on_full_disk=continue"), "", tmp_path, small)


def test_memory_that_shared_weights_would_fill_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"published weights need .* of memory .* 10 B are free"):
        check_room(config_of(), "", tmp_path, Room(disk=lambda folder: PLENTY, memory=lambda: 10))
