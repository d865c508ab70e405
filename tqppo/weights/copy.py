"""Weights published on another node, copied into this node's shared memory for engines that load files."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from tqppo.protocols import WeightSender, WeightSource
from tqppo.run.cluster import PUBLISH_PREFIX

PIECE_BYTES = 64 * 1024**2  # of one object in Ray's store


class Copies:
    """The newest two, as the publisher keeps them: a folder stays as it is until two later ones are here."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._folders: list[Path] = []

    async def fetch(self, source: WeightSource, sender: WeightSender) -> WeightSource:
        if self._root is None:
            shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
            self._root = Path(tempfile.mkdtemp(prefix=f"{PUBLISH_PREFIX}{os.getpid()}-", dir=shared))
        draft = self._root / "draft"
        if len(self._folders) >= 2:
            os.rename(self._folders.pop(0), draft)  # its pages are written again
        draft.mkdir(exist_ok=True)
        for name, size in (await sender.files(source.folder)).items():
            await self._copy(source, sender, draft / name, size)
        folder = self._root / f"v{source.version}"
        if folder in self._folders:  # the same version again, after a resume within one process
            self._folders.remove(folder)
            shutil.rmtree(folder)
        os.rename(draft, folder)
        self._folders.append(folder)
        return replace(source, folder=str(folder), node="", sender=None)

    async def _copy(self, source: WeightSource, sender: WeightSender, to: Path, size: int) -> None:
        with open(to, "r+b" if to.exists() else "w+b") as file:
            file.truncate(size)
            begins = range(0, size, PIECE_BYTES)
            coming = [asyncio.ensure_future(sender.read(source.folder, to.name, b, PIECE_BYTES)) for b in begins[:1]]
            for begin in begins:
                piece = await coming.pop()
                if begin + PIECE_BYTES < size:  # the next piece travels while this one is written
                    following = sender.read(source.folder, to.name, begin + PIECE_BYTES, PIECE_BYTES)
                    coming.append(asyncio.ensure_future(following))
                await asyncio.to_thread(file.write, piece.data)

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root, self._folders = None, []
