"""Makes the files that presets train on: from the hub, or from copies of a dataset on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqppo import tables
from tqppo.data.recipes import Recipe
from tqppo.errors import DataError, PreflightError
from tqppo.tables import Placed

SPLITS = ("train", "test", "validation")
IN_FOLDERS = (".parquet", ".jsonl", ".ndjson")  # other endings in a dataset's folder are mostly notes about it


def make_files(recipe: Recipe, copies: Sequence[Path], folder: Path) -> dict[Path, int]:
    """Write one parquet file per split; returns the number of rows of each."""
    sources = local_files(copies or [download(recipe)], unnamed=recipe.unnamed)
    return {folder / f"{split}.parquet": _write(recipe, split, paths, folder) for split, paths in sources.items()}


def local_files(copies: Sequence[Path], *, unnamed: str = "train") -> dict[str, list[Path]]:
    """Files by split, which their names tell; a name without a split is of the split `unnamed`."""
    found: dict[str, list[Path]] = {}
    for given in copies:
        if not given.exists():
            raise DataError(f"there is no {given}")
        inside = sorted(path for path in given.rglob("*") if path.suffix in IN_FOLDERS) if given.is_dir() else [given]
        if not inside:
            raise DataError(f"{given} has no file that ends in {', '.join(IN_FOLDERS)}")
        for path in inside:
            split = next((each for each in SPLITS if each in path.stem.lower()), unnamed)
            found.setdefault(split, []).append(path)
    return found


def download(recipe: Recipe) -> Path:
    """The folder with the dataset's files, from the hub or from its cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [f"{recipe.inside}*{ending}" for ending in IN_FOLDERS]
    try:
        folder = snapshot_download(recipe.repository, repo_type="dataset", allow_patterns=wanted)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise PreflightError(
            f"{recipe.repository} cannot be downloaded: {why}\n"
            f"On a machine with network: hf download {recipe.repository} --repo-type dataset --local-dir COPY\n"
            "Then here: the same command with --from COPY (a folder, or its .parquet or .jsonl files)"
        ) from None
    return Path(folder) / recipe.inside


def rows_of(path: Path) -> Iterator[Placed]:
    if path.suffix != ".parquet":
        yield from tables.read(path)
        return
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a parquet file: {error}") from error


def _write(recipe: Recipe, split: str, paths: Sequence[Path], folder: Path) -> int:
    """Convert the rows of a split, each prompt once: some datasets repeat theirs for every epoch."""
    import pyarrow
    import pyarrow.parquet

    rows: dict[str, dict[str, object]] = {}
    for path in paths:
        for where, row in rows_of(path):
            try:
                converted = recipe.row(row, split, len(rows))
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
            rows.setdefault(json.dumps(converted["prompt"], sort_keys=True), converted)
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no rows")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{split}.parquet.draft"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows.values())), draft)
    os.replace(draft, folder / f"{split}.parquet")
    return len(rows)
