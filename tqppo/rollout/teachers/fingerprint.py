"""What identifies a frozen model: a digest of its files, so that a resumed run notices another teacher. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja")  # config, tokenizer, index of the weights
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
WHOLE_BYTES = 1 << 28  # weights up to this size are read whole; of larger ones, samples
SAMPLES, SAMPLE_BYTES = 256, 1 << 16


def model_fingerprint(model: str) -> str:
    """A digest of the model's files; empty if they are not on this machine. `model` is a folder or a hub name."""
    folder = local_folder(model)
    if folder is None:
        return ""
    digest = blake2b(digest_size=16)
    for path in sorted(_files(folder)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}:{size}\n".encode())
        for piece in _pieces(path, size):
            digest.update(piece)
    return digest.hexdigest()


def local_folder(model: str) -> Path | None:
    """The folder itself, or the snapshot of a hub's model in the local cache."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _files(folder: Path) -> Iterator[Path]:
    for pattern in (*DESCRIPTIONS, *WEIGHTS):
        yield from (path for path in folder.glob(pattern) if path.is_file())


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """The file's content, or of a large one samples at even distances; the first holds the names and shapes."""
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while piece := file.read(1 << 20):
                yield piece
            return
        for number in range(SAMPLES):
            file.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
