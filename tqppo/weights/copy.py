"""Copies of weights that were published on another node, for engines that load files. The rollout worker owns them."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

from tqppo.processes.reaper import Claim, claim
from tqppo.protocols import WeightSender, WeightSource
from tqppo.space import allocate
from tqppo.weights import location

PIECE_BYTES = 64 * 1024**2  # one object in Ray's store


class Copies:
    """The newest two versions, in this node's shared memory. A folder stays unchanged until two later ones exist."""

    def __init__(self) -> None:
        self._claim: Claim | None = None
        self._folders: list[Path] = []

    async def fetch(self, source: WeightSource, sender: WeightSender) -> WeightSource:
        """Copy the source's folder here and return a source that any process of this node can read."""
        files = await sender.files(source.folder)
        if self._claim is None:
            location.remove_abandoned()
            self._claim = claim(location.new_folder(sum(files.values())))
        draft = self._claim.folder / "draft"
        if len(self._folders) >= 2:
            os.rename(self._folders.pop(0), draft)  # reuses its pages
        draft.mkdir(mode=0o700, exist_ok=True)
        for name, size in files.items():
            await self._copy(source, sender, draft / name, size)
        folder = self._claim.folder / f"v{source.version}"
        if folder in self._folders:  # the same version again, after a resume within one process
            self._folders.remove(folder)
            shutil.rmtree(folder)
        os.rename(draft, folder)
        self._folders.append(folder)
        return replace(source, folder=str(folder), node="", sender=None)

    async def _copy(self, source: WeightSource, sender: WeightSender, to: Path, size: int) -> None:
        allocate(to, size, is_private=True)
        begins = range(0, size, PIECE_BYTES)
        with to.open("r+b") as file:
            coming = [asyncio.ensure_future(sender.read(source.folder, to.name, b, PIECE_BYTES)) for b in begins[:1]]
            for begin in begins:
                piece = await coming.pop()
                if begin + PIECE_BYTES < size:  # fetch the next piece while this one is written
                    following = sender.read(source.folder, to.name, begin + PIECE_BYTES, PIECE_BYTES)
                    coming.append(asyncio.ensure_future(following))
                await asyncio.to_thread(file.write, piece.data)

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim, self._folders = None, []
