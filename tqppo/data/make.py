"""Makes the files that presets train on: from the hub, or from copies of a dataset on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqppo.builtin import DATA_FILES
from tqppo.data.dataset import parse_row
from tqppo.data.recipes import FileRow, Recipe
from tqppo.errors import DataError, PreflightError

SPLITS = ("train", "test", "validation")


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
        inside = sorted(path for path in given.rglob("*") if path.suffix in DATA_FILES) if given.is_dir() else [given]
        if not inside:
            raise DataError(f"{given} has no file that ends in {', '.join(DATA_FILES)}")
        for path in inside:
            split = next((each for each in SPLITS if each in path.stem.lower()), unnamed)
            found.setdefault(split, []).append(path)
    return found


def download(recipe: Recipe) -> Path:
    """The folder with the dataset's files, from the hub or from its cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [f"{recipe.inside}*{ending}" for ending in DATA_FILES]
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


def rows_of(path: Path) -> Iterator[FileRow]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=4096):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a parquet file: {error}") from error
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parse_row(line, f"{path}:{number}")


def _write(recipe: Recipe, split: str, paths: Sequence[Path], folder: Path) -> int:
    """Convert the rows of a split, each prompt once: some datasets repeat theirs for every epoch."""
    import pyarrow
    import pyarrow.parquet

    rows: dict[str, dict[str, object]] = {}
    for path in paths:
        for number, row in enumerate(rows_of(path), 1):
            try:
                converted = recipe.row(row, split, len(rows))
            except DataError as error:
                raise DataError(f"{path}: row {number}: {error}") from None
            rows.setdefault(json.dumps(converted["prompt"], sort_keys=True), converted)
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no rows")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{split}.parquet.draft"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows.values())), draft)
    os.replace(draft, folder / f"{split}.parquet")
    return len(rows)
