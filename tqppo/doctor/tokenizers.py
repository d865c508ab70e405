"""Loads the tokenizer of a model that a user names: a folder, a hub name, or `tiny`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tqppo.errors import PreflightError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    if model == "tiny":
        from tqppo.tiny.model import byte_tokenizer

        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(f"the tokenizer of {model!r} cannot be loaded: {reason}") from None
    return cast("PreTrainedTokenizerBase", loaded)
