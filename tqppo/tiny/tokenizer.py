"""The tokenizer of the built-in models: one token per byte, and a few for the chat template. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8; ids 0–255 are the bytes in `tokenizers`' byte alphabet, special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:-1]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
