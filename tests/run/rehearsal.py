"""Runs without Ray and without a model, in a fraction of a second.

The commands, the loop, the lock, checkpoints, metrics, events and signals are the genuine ones. Only the processes of
the run are a stand-in, whose weights are one number that every step changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tqppo.config.compilation import Compilation
from tqppo.config.compile import compile_config
from tqppo.metrics import files as metrics
from tqppo.run import launch, start
from tqppo.run.folder import RunFolder
from tqppo.space import Digest


@dataclass
class StandInPart:
    """What a run writes in the background: all of it when it is looked at for the second time."""

    folder: Path
    weight: int
    happens: Callable[[str], None]
    is_seen: bool = False

    def written(self, wait_s: float) -> dict[str, Digest] | None:
        if not self.is_seen:
            self.is_seen = True
            (self.folder / "actor" / "model").write_text("weights of ")
            return None
        self.happens(f"write {self.folder.name.split('-')[1]}")
        (self.folder / "actor" / "model").write_text(f"weights of {self.weight}")
        return {}


@dataclass
class StandIn:
    """What `build` returns. It says what it does to `happens`, which may raise, send signals or fill the disk."""

    happens: Callable[[str], None]
    weight: int = 1
    example: str = "'1+1?' → '2', reward 1"

    @property
    def trainer(self) -> StandIn:
        return self

    @property
    def validator(self) -> StandIn:
        return self

    def step(self, step: int) -> dict[str, float]:
        self.happens(f"step {step}")
        self.weight = (self.weight * 31 + step) % 1_000_003
        return {"weight": float(self.weight)}

    def save(self, folder: Path) -> dict[str, Digest]:
        (folder / "actor").mkdir()
        (folder / "actor" / "model").write_text("weights of ")
        self.happens(f"save {folder.name.split('-')[1]}")
        (folder / "actor" / "model").write_text(f"weights of {self.weight}")
        return {}

    def begin_save(self, folder: Path) -> StandInPart:
        self.happens(f"copy {folder.name.split('-')[1]}")
        (folder / "actor").mkdir()
        return StandInPart(folder, self.weight, self.happens)

    def load(self, folder: Path, driver_state: dict[str, Any], step: int) -> None:
        self.happens("load")
        self.weight = int((folder / "actor" / "model").read_text().rpartition(" ")[2])
        assert driver_state == self.driver_state()

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model").write_text("weights of ")
        self.happens("export")
        (folder / "model").write_text(f"weights of {self.weight}")

    def driver_state(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def checkpoint_bytes(self) -> int:
        return 0

    def validate(self) -> dict[str, float]:
        return {"val": float(self.weight)}

    def measure(self, measured: dict[str, float], seconds: float) -> dict[str, float]:
        return measured | {"timing_s/step": seconds}

    def leftovers(self) -> list[str]:
        return []


@dataclass
class Rehearsal:
    """Runs in `runs`. `troubles` are actions by the moment at which they happen; `seen` has the moments so far."""

    runs: Path
    troubles: dict[str, Callable[[], object]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def happens(self, moment: str) -> None:
        self.seen.append(moment)
        if action := self.troubles.pop(moment, None):
            action()

    def build(self, *_: object, **__: object) -> StandIn:
        self.happens("build")
        return StandIn(self.happens)

    def modules(self) -> dict[str, ModuleType]:
        """What stands in for the modules that import torch and Ray."""
        built = ModuleType("tqppo.run.build")
        built.build = self.build  # type: ignore[attr-defined]
        return {"tqppo.run.build": built}

    def install(self) -> None:
        """Put the stand-ins into this process, for scripts; tests use the fixture `rehearsal`."""
        sys.modules.update(self.modules())
        launch.ray_cluster = no_cluster  # type: ignore[assignment]

    def train(self, name: str, *settings: str) -> int:
        return start.train(self.compiled(name, *settings))

    def compiled(self, name: str, *settings: str) -> Compilation:
        given = [f'run.dir="{self.runs}"', f'run.name="{name}"', "run.max_steps=4", "checkpoint.interval=1", *settings]
        compilation = compile_config("quickstart", [], given, {})
        assert compilation.ok, compilation.diagnostics
        return compilation

    def resume(self, name: str, **options: Any) -> int:
        return start.resume(str(self.runs / name), [], **options)

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.runs / name)

    def steps(self, name: str) -> list[float | None]:
        """The steps in metrics.jsonl."""
        return [line["step"] for line in metrics.read(self.folder(name).metrics)]

    def saved(self, name: str) -> list[str]:
        return sorted(path.name for path in self.folder(name).checkpoints.iterdir() if not path.is_symlink())

    def result(self, name: str) -> tuple[bytes, str]:
        """What two runs of one config must agree on: metrics without timings, and the exported weights."""
        return metrics.comparable(self.folder(name).metrics), (self.folder(name).export / "model").read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder(name).events.read_text().splitlines()]


def no_cluster(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()


def contents(run: Path, *without: str) -> dict[str, bytes]:
    """Every file of a run by name, but its lock and the names that begin with one of `without`."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    found = {str(path.relative_to(run)): path.read_bytes() for path in files}
    return {name: data for name, data in found.items() if not name.startswith(without)}


def left_behind(run: Path) -> list[str]:
    """Whatever is not whole: partial checkpoints and exports, drafts."""
    names = (".partial", ".before", ".later")
    return [str(path) for path in run.rglob(".*") if path.name.startswith(names) or path.name.endswith(".draft")]
