"""Loads the tokenizer of a model that a user names: a folder, a hub name, or `tiny`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tqppo.hub import use_cache_without_network
from tqppo.untrusted import loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    if model == "tiny":
        from tqppo.tiny.tokenizer import byte_tokenizer

        return byte_tokenizer()
    use_cache_without_network([model])
    from transformers import AutoTokenizer

    with loading(f"the tokenizer of {model!r}"):
        loaded = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    return cast("PreTrainedTokenizerBase", loaded)
