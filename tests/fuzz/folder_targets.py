"""Folders from elsewhere: checkpoints with their manifests, snapshots of the queue, models."""

from __future__ import annotations

import json
import logging
import random
import zlib
from contextlib import suppress
from pathlib import Path

import torch
from fuzz.mutations import changed, damaged
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from tqppo.config.plan.shapes import shape_of
from tqppo.config.read.vocabulary import vocabulary_of
from tqppo.doctor.tokenizers import load_tokenizer
from tqppo.queue.client import Queue
from tqppo.queue.saved import INDEX
from tqppo.run.checkpoint import CONFIG, DRIVER, MANIFEST, CheckpointStore
from tqppo.space import Digest
from tqppo.tiny.model import write_tiny_model
from tqppo.weights.file import MODEL_FILE, MappedFile
from tqppo.workers.compute.loading import TensorFiles, open_model
from tqppo.workers.specs import ModelSpec


class Folder:
    """A folder whose files are put back as they were before each case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        self.names = sorted(map(str, self._files))

    def restore(self) -> None:
        for file in [each for each in self.path.rglob("*") if each.is_symlink() or each.is_file()]:
            file.unlink()
        for name, data in self._files.items():
            (self.path / name).write_bytes(data)

    def damage_a_file(self, rng: random.Random, names: list[str] | None = None) -> None:
        file = self.path / rng.choice(names or self.names)
        if file.is_symlink() or not file.is_file():
            return
        how = rng.random()
        if how < 0.05:
            file.unlink()
        elif how < 0.1:
            file.unlink()
            file.symlink_to(rng.choice(("/dev/zero", "/", "nowhere", file.name)))
        else:
            file.write_bytes(damaged(rng, file.read_bytes()))

    def change_json(self, rng: random.Random, name: str) -> object:
        value = changed(rng, json.loads((self.path / name).read_bytes()))
        (self.path / name).write_text(json.dumps(value))
        return value


class Manifests:
    """A run with two checkpoints, of which manifests and states are changed."""

    name = "manifests"

    def __init__(self, folder: Path) -> None:
        self._run = folder / "run"
        (self._run / "checkpoints").mkdir(parents=True)
        (self._run / CONFIG).write_text('mode = "grpo"\n')
        for step in (1, 2):
            self._store().write(step, self._save, {"step": step, "prompts": {"epoch": 0}})
        (self._run / "checkpoints" / "latest").unlink()
        self._folder = Folder(self._run)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._run / "checkpoints", run_files=lambda: [self._run / CONFIG])

    @staticmethod
    def _save(folder: Path) -> dict[str, Digest]:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.safetensors").write_bytes(bytes(64))
        return {}

    def make(self, rng: random.Random) -> None:
        self._folder.restore()
        manifests = [name for name in self._folder.names if name.endswith(MANIFEST)]
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.6:
                self._folder.change_json(rng, rng.choice(manifests))
            else:
                self._folder.damage_a_file(rng)
                manifests = [name for name in manifests if _is_json(self._run / name)]
                if not manifests:
                    return

    def read(self) -> None:
        store = self._store()
        found = store.newest()
        if found.step != 2 and (store.folder / f"step_000002/{DRIVER}").is_file():
            found.driver_state()
        found.driver_state()

    def close(self) -> None:
        pass


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes()) if path.is_file() else json.loads("")
    except (ValueError, RecursionError):
        return False
    return True


class QueueSnapshots:
    """Snapshots with other contents; mostly with the checksums of these, as someone writes them on purpose."""

    name = "snapshots"

    def __init__(self, folder: Path) -> None:
        self._queue = Queue.create("simple", budget_bytes=64 << 20, local=True)
        rows = [torch.arange(3), torch.arange(5)]
        self._queue.put(["a", "b"], {"tokens": rows, "reward": torch.ones(2)}, tags=[{"order": 0}, {"order": 1}])
        self._queue.put(["c"], {"tokens": [torch.arange(2)]}, tags=[{"order": 2}])
        self._queue.snapshot(folder / "saved")
        self._folder = Folder(folder / "saved")

    def make(self, rng: random.Random) -> None:
        self._folder.restore()
        if rng.random() < 0.3:
            self._folder.damage_a_file(rng)
        if rng.random() < 0.6 and (self._folder.path / INDEX).is_file():
            self._change_index(rng)
        if rng.random() < 0.8:
            self._sign()

    def _change_index(self, rng: random.Random) -> None:
        with suppress(ValueError, RecursionError):  # it was damaged before
            self._folder.change_json(rng, INDEX)

    def _sign(self) -> None:
        """Make the checksums of blocks and index those of what is there."""
        index = self._folder.path / INDEX
        if not index.is_file() or not _is_json(index):
            return
        state = json.loads(index.read_bytes())
        if not isinstance(state, dict):
            return
        blocks = state.get("blocks")
        for entry in blocks.values() if isinstance(blocks, dict) else ():
            file = isinstance(entry, dict) and entry.get("file")
            if isinstance(file, str) and file in self._folder.names and (self._folder.path / file).is_file():
                data = (self._folder.path / file).read_bytes()
                entry |= {"bytes": len(data), "crc32": zlib.crc32(data)}
        state.pop("crc32", None)
        index.write_text(json.dumps({**state, "crc32": zlib.crc32(json.dumps(state, sort_keys=True).encode())}))

    def read(self) -> None:
        self._queue.restore(self._folder.path)
        for partition in self._queue.stats()["partitions"]:
            found = self._queue.list(partition)
            for column in found.columns:
                self._queue.get(found, [column])

    def close(self) -> None:
        self._queue.close()


class Models:
    """Folders of a small model: other configs, other headers of its weights, other tokenizers."""

    name = "models"

    def __init__(self, folder: Path) -> None:
        transformers_logging.set_verbosity(logging.CRITICAL)  # type: ignore[no-untyped-call]
        write_tiny_model(folder / "model", hidden_size=16, num_layers=1, num_heads=2)
        self._folder = Folder(folder / "model")

    def make(self, rng: random.Random) -> None:
        self._folder.restore()
        name = rng.choice(self._folder.names)
        if name == MODEL_FILE and rng.random() < 0.6:
            self._change_header(rng)
        elif name.endswith(".json") and rng.random() < 0.7:
            self._folder.change_json(rng, name)
        else:
            self._folder.damage_a_file(rng, [name])

    def _change_header(self, rng: random.Random) -> None:
        data = (self._folder.path / MODEL_FILE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(changed(rng, json.loads(data[8 : 8 + length]))).encode()
        (self._folder.path / MODEL_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])

    def read(self) -> None:
        path = str(self._folder.path)
        shape = shape_of(path)
        if shape is not None:
            assert shape.parameters + shape.cached_numbers + shape.head_size >= 0
        vocabulary_of(path)
        self._map_tensors()
        load_tokenizer(path)
        TensorFiles.find(path)
        open_model(AutoModelForCausalLM, ModelSpec(path), torch.device("cpu"), is_frozen=True)

    def _map_tensors(self) -> None:
        try:
            mapped = MappedFile.open(self._folder.path / MODEL_FILE)
            for name in mapped.places:
                mapped.tensor(name).float().sum()
        except (OSError, ValueError):  # what it promises to raise
            pass

    def close(self) -> None:
        pass
