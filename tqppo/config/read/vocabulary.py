"""The vocabulary of a model from its tokenizer's files, without transformers or torch.

The token ids of student and teacher must mean the same text. `tokenizer.json` holds them for nearly every model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqppo.untrusted import read_file, read_json

MAX_BYTES = 1 << 28  # of a tokenizer's file; the largest known ones have 30 MB


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token → id, the special tokens among them, and the token that ends an answer (empty: not said)."""

    ids: Mapping[str, int]
    special: frozenset[str]
    end: str

    @property
    def fingerprint(self) -> str:
        """A short digest of ids and special tokens: equal vocabularies have equal fingerprints."""
        content = json.dumps([sorted(self.ids.items()), sorted(self.special)], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Difference:
    """A token on which two vocabularies disagree; an id of None: that vocabulary does not have the token."""

    token: str
    own: int | None
    other: int | None

    def __str__(self) -> str:
        if self.own == self.other:
            return f"{self.token!r} is special in one of them only"
        return f"{self.token!r} is {_id(self.own)} for the student and {_id(self.other)} for the teacher"


def _id(number: int | None) -> str:
    return "missing" if number is None else f"token {number}"


def differences(own: Vocabulary, other: Vocabulary) -> list[Difference]:
    """All tokens that differ in their id or in being special, the lowest ids first."""
    tokens = [token for token in own.ids.keys() | other.ids.keys() if own.ids.get(token) != other.ids.get(token)]
    tokens += [token for token in own.special ^ other.special if own.ids.get(token) == other.ids.get(token)]
    found = [Difference(token, own.ids.get(token), other.ids.get(token)) for token in tokens]
    return sorted(found, key=lambda each: (min(_ids(each)), each.token))


def _ids(each: Difference) -> Iterator[int]:
    return (number for number in (each.own, each.other) if number is not None)


def vocabulary_of(path: str) -> Vocabulary | None:
    """The vocabulary of a folder, or of a hub name that this machine has in its cache; None if it is unknown."""
    folder = _folder(path)
    if folder is None:
        return None
    file = folder / "tokenizer.json"
    try:
        return _read(file, file.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _folder(path: str) -> Path | None:
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):
        return folder
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.strip('/').replace('/', '--')}"
    try:
        snapshot = cached / "snapshots" / read_file(cached / "refs" / "main", 4096).decode().strip()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


@lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> Vocabulary:
    """Reads a tokenizer.json. `changed` is the file's time, so that a changed file is read again."""
    content: Any = read_json(file, MAX_BYTES)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: (token, score) in the order of the ids
        ids = {str(entry[0]): i for i, entry in enumerate(vocabulary)}
    else:
        ids = {str(token): int(i) for token, i in vocabulary.items()}
    added = content.get("added_tokens") or []
    ids |= {str(each["content"]): int(each["id"]) for each in added}
    special = frozenset(str(each["content"]) for each in added if each.get("special"))
    return Vocabulary(ids, special, _end(file.with_name("tokenizer_config.json")))


def _end(file: Path) -> str:
    """The token that ends an answer, as tokenizer_config.json names it."""
    if not file.is_file():
        return ""
    content: Any = read_json(file, MAX_BYTES)
    named = content.get("eos_token") or ""
    return str(named["content"] if isinstance(named, dict) else named)
