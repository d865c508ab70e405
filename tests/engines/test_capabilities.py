"""Engines of others: found by entry point, checked by what they declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqppo.config.checks.engines import installed
from tqppo.config.compile import compile_config
from tqppo.config.schema import settings
from tqppo.engines.capabilities import OURS, OWNED, capabilities_of
from tqppo.protocols import EngineCapabilities


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two engines, of which one declares what it can do."""
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    engines = "[tqppo.rollout]\nacme = acme_engines:Missing\nquiet = acme_engines:Missing\n"
    (info / "entry_points.txt").write_text(f"{engines}[tqppo.capabilities]\nacme = acme_engines:CAN\n")
    (tmp_path / "acme_engines.py").write_text(
        "from tqppo.protocols import EngineCapabilities\nCAN = EngineCapabilities(attach=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()


@pytest.mark.usefixtures("third_party")
def test_a_third_partys_engine_is_checked_by_what_it_declares() -> None:
    try:
        assert capabilities_of("acme") == EngineCapabilities(attach=True)
        found = compile_config(None, [], ["rollout.backend=acme", "rollout.tensor_parallel=2"], {}).diagnostics
        assert [each.code for each in found] == ["E402"]
        sets = ["mode=distill", "teachers.t.path=p", "teachers.t.backend=acme"]
        assert [each.code for each in compile_config(None, [], sets, {}).diagnostics] == ["E505"]
        assert compile_config(None, [], ["rollout.backend=quiet", "rollout.python=x"], {}).ok
    finally:
        installed.cache_clear()


def test_an_engine_that_is_not_installed_is_unknown() -> None:
    assert capabilities_of("acme") is None
    (found,) = compile_config(None, [], ["rollout.backend=acme"], {}).diagnostics
    assert found.code == "E401"


def test_settings_that_are_named_instead_of_an_engines_argument_exist() -> None:
    for backend, owned in OWNED.items():
        for name, setting in owned.items():
            assert setting == OURS or setting.partition(",")[0] in settings(), (backend, name)
            found = compile_config(None, [], [f"rollout.backend={backend}", f"rollout.engine_args.{name}=1"], {})
            assert [each.code for each in found.diagnostics] == ["E417"], name
        assert compile_config(None, [], [f"rollout.backend={backend}", "rollout.engine_args.other=1"], {}).ok
    teacher = ["mode=distill", "teachers.t.path=p", "teachers.t.backend=vllm", "teachers.t.engine_args.port=1"]
    assert "E417" in [each.code for each in compile_config(None, [], teacher, {}).diagnostics]
