"""Fake GPUs, as the environment asks for them."""

from __future__ import annotations

import pytest

from tqppo.devices.fake_gpus import COUNT, MEMORY, fake_gpus
from tqppo.errors import UsageError


def test_there_are_none_unless_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COUNT, raising=False)
    assert fake_gpus() is None


def test_count_and_memory_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "8")
    found = fake_gpus()
    assert found is not None
    assert (found.count, found.memory_bytes) == (8, 80 * 2**30)
    assert getattr(fake_gpus(24.0), "memory_bytes", 0) == 24 * 2**30
    monkeypatch.setenv(MEMORY, "0.5")
    found = fake_gpus()
    assert found is not None
    assert found.memory_bytes == 2**29


def test_another_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "many")
    with pytest.raises(UsageError, match="TQPPO_FAKE_GPUS is a number"):
        fake_gpus()
