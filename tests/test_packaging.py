"""The package as users get it: a wheel and an editable install, each in an empty environment, run from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "share/bash-completion/completions/tqppo.bash": "tqppo.bash",
    "share/zsh/site-functions/_tqppo": "_tqppo",
    "share/fish/vendor_completions.d/tqppo.fish": "tqppo.fish",
}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Standard output of a command that must succeed; nothing of ours in the environment."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "LANG": "C.UTF-8"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> str:
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    return run([sys.executable, "-m", "pip", *arguments, *offline], cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a package is built from, where building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("tqppo", "backends", "presets", "completions"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], folder)
    return next(folder.glob("tqppo-*.whl"))


def empty_environment(folder: Path) -> Path:
    """An environment that has our dependencies (by pointing at this one's) but not us."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def renamed(path: Path) -> Path:
    """Where a file of the tree goes: `backends/` installs as `tqppo_backends`, `presets/` as `tqppo_presets`."""
    folders = {folder: name for name, folder in project()["tool"]["setuptools"]["package-dir"].items()}
    first, *rest = path.parts
    return Path(folders.get(first, first), *rest)


def test_every_package_folder_is_listed() -> None:
    modules = [path for top in ("tqppo", "backends", "presets") for path in (ROOT / top).rglob("*.py")]
    found = {".".join(renamed(path.parent.relative_to(ROOT)).parts) for path in modules}
    assert set(project()["tool"]["setuptools"]["packages"]) == found


def test_building_needs_setuptools_only() -> None:
    assert [each.split(">")[0] for each in project()["build-system"]["requires"]] == ["setuptools"]


def test_constraints_pin_every_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    about = project()["project"]
    needed = [*about["dependencies"], *about["optional-dependencies"]["dev"]]
    names = {_requirement(each) for each in needed} - {"tqppo", "tomli", "setuptools"}
    assert names <= pinned


def test_the_container_is_made_of_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) /opt/\S+$", text, re.M) for name in line.split()]
    assert set(copied) >= {"pyproject.toml", "constraints.txt", "tqppo", "backends", "presets", "completions"}
    assert not [name for name in copied if not (ROOT / name).exists()]
    (extras,) = re.findall(r"/opt/tqppo\[(.*)\]", text)
    assert set(extras.split(",")) <= set(project()["project"]["optional-dependencies"])
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)
    page = (ROOT / "docs/gpus-and-clusters.md").read_text()
    arguments = set(re.findall(r"--build-arg (\w+)=", page + text))
    assert arguments == set(re.findall(r"^ARG (\w+)", text, re.M))


def _requirement(text: str) -> str:
    for mark in ("[", ">", ";", "=", " "):
        text = text.split(mark)[0]
    return text.lower().replace("_", "-")


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_tree(source: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in ("tqppo", "backends", "presets"):
        for path in (source / top).rglob("*"):
            assert path.is_dir() or renamed(path.relative_to(source)).as_posix() in names, path
    for place in SCRIPTS:
        assert any(name.endswith(f".data/data/{place}") for name in names), place
    assert not any(name.startswith("tests") for name in names)


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = empty_environment(tmp_path / "env")
    pip("--python", environment / "bin/python", "install", wheel, cwd=tmp_path)
    for place, name in SCRIPTS.items():
        assert (environment / place).read_text() == (ROOT / "completions" / name).read_text()
    check_installed(environment, tmp_path, inside=environment)


@pytest.mark.slow
def test_editable_install_works_in_an_empty_environment(source: Path, tmp_path: Path) -> None:
    environment = empty_environment(tmp_path / "env")
    pip("--python", environment / "bin/python", "install", "--editable", source, cwd=tmp_path)
    check_installed(environment, tmp_path, inside=source)


def check_installed(environment: Path, folder: Path, *, inside: Path) -> None:
    """The command runs from another folder, on the files of this very install."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    python, tqppo = environment / "bin/python", environment / "bin/tqppo"
    assert inside in Path(run([python, "-c", "import tqppo; print(tqppo.__file__)"], elsewhere).strip()).parents
    assert run([tqppo, "--version"], elsewhere).startswith("tqppo ")
    listed = json.loads(run([tqppo, "presets", "list", "--json"], elsewhere))
    assert "quickstart" in {each["name"] for each in listed}
    assert all(inside in Path(each["path"]).parents for each in listed)
    run([tqppo, "validate-config", "--preset", "quickstart"], elsewhere)
    ready = {each["name"] for each in json.loads(run([tqppo, "backends", "list", "--json"], elsewhere))}
    assert {"embedded", "vllm", "sglang", "simple", "ray", "transferqueue"} <= ready
