"""Small chat templates with the faults of well-known ones, for tests of conversations and of `template check`.

Each is written here to behave like its model; none is a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from transformers import PreTrainedTokenizerFast

from tqppo.rollout.template import ChatTemplate, Tokenizer
from tqppo.tiny.tokenizer import byte_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]

CALLS = (
    "{% for call in m.tool_calls %}"
    "{{ '\\n' if not loop.first or m.content }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
)
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(turn: str = TURN, *, head: str = TOOLS, begin: str = BEGIN) -> str:
    return head + "{% for m in messages %}" + turn + "{% endfor %}" + begin


WITHOUT_THOUGHTS = (
    "{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content and CONDITION %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}" + CALLS + "<|im_end|>\n"
)
LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
MERGED_RESULTS = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}" + TURN + "{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "sound": chatml(),
    # Thoughts before the last question are left out, as in Qwen3.
    "strips_before_last_question": chatml(
        WITHOUT_THOUGHTS.replace("CONDITION", "loop.index0 < ns.last"), head=LAST_QUESTION + TOOLS
    ),
    # All earlier thoughts are left out, and the template opens the next ones, as in DeepSeek-R1.
    "strips_all_thoughts": chatml(
        WITHOUT_THOUGHTS.replace("CONDITION", "true"),
        begin="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    ),
    # An empty thought before the answer, which the history does not show.
    "inserts_empty_thoughts": chatml(
        WITHOUT_THOUGHTS.replace("CONDITION", "true"),
        begin="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
    ),
    "turns_without_end": chatml("<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "\n"),
    "no_end_on_last_turn": chatml(
        "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "{% if not loop.last %}<|im_end|>\n{% endif %}"
    ),
    "blank_lines_after_turns": chatml(TURN + "\n\n"),
    # Only structured calls are written, keys in order and without spaces; a result must follow such a call.
    "rewrites_calls": chatml(
        "{% set before = messages[loop.index0 - 1] %}"
        "{% if m.role == 'tool' and not before.tool_calls and before.role != 'tool' %}"
        "{{ raise_exception('a result must follow a call') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}<tool_call>"
        '{"arguments":{{ call.function.arguments | tojson(separators=(",", ":")) }},"name":"{{ call.function.name }}"}'
        "</tool_call>{% endfor %}<|im_end|>\n"
    ),
    "trims_content": chatml("<|im_start|>{{ m.role }}\n{{ m.content | trim }}" + CALLS + "<|im_end|>\n"),
    "inserts_date": chatml(head="<|im_start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|im_end|>\n" + TOOLS),
    "adds_system_prompt": chatml(
        head="{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}" + TOOLS
    ),
    "merges_results": chatml(MERGED_RESULTS),
    "refuses_tools": chatml(
        "{% if m.role == 'tool' %}{{ raise_exception('unknown role') }}{% endif %}" + TURN, head=""
    ),
    "refuses_system": chatml("{% if m.role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}" + TURN),
    "wants_alternation": chatml(
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + TURN
    ),
    # What looks like a call is taken out of the text.
    "hides_lookalikes": chatml(
        "<|im_start|>{{ m.role }}\n{{ m.content.split('<tool_call>')[0] }}" + CALLS + "<|im_end|>\n"
    ),
}


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with ChatML's special tokens, and a template by name or as text."""
    made = byte_tokenizer()
    add: Callable[[dict[str, object]], int] = made.add_special_tokens
    add({"additional_special_tokens": SPECIAL, "eos_token": "<|im_end|>"})
    made.chat_template = TEMPLATES.get(template, template)
    return made


def chat(template: str) -> ChatTemplate:
    return ChatTemplate(cast(Tokenizer, tokenizer(template)))
