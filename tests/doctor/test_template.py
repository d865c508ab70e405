"""`template check` finds the faults that were planted in small templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import TEMPLATES, chat, tokenizer

from tqppo.doctor.template import check_templates, load_chat, render
from tqppo.errors import PreflightError

NEWLINE = "adds the end of a turn"  # ChatML writes a newline after it
CALLS = "adds tool calls"  # ChatML writes them with spaces of its own

FAULTS: dict[str, set[str]] = {
    "sound": set(),
    "strips_before_last_question": {
        "breaks turn 1 of thoughts, then a question",
        "breaks turn 2 of a tool call, an answer, a question",
    },
    "strips_all_thoughts": {
        "breaks turn 1 of thoughts, then a question",
        "breaks turn 1 of thoughts, then a result",
        "breaks turn 1 of a tool call, an answer, a question",
        "adds the generation prompt",
    },
    "inserts_empty_thoughts": {
        *(f"breaks turn 1 of {play}" for play in ("two questions", "blanks around an answer", "a tool call")),
        "adds the generation prompt",
    },
    "turns_without_end": {"adds the end of a turn"},
    "no_end_on_last_turn": {"adds the end of the last turn", "breaks turn 1 of two questions"},
    "blank_lines_after_turns": {"adds the end of a turn"},
    "rewrites_calls": {
        "breaks turn 1 of a tool call in other spaces",
        "adds tool calls",
        "refuses the role tool after the text of a call",
    },
    "trims_content": {"breaks turn 1 of blanks around an answer"},
    "inserts_date": {"adds the date"},
    "adds_system_prompt": {"adds a system prompt"},
    "merges_results": {"adds results in a row"},
    "refuses_tools": {"refuses the role tool", "adds tools"},
    "refuses_system": {"refuses the role system"},
    "wants_alternation": {"refuses two questions in a row", "refuses the role tool", "refuses the role system"},
    "hides_lookalikes": {"breaks turn 1 of text that looks like a tool call"},
}


def found(name: str) -> set[str]:
    return {
        f"{each.kind} turn {each.turn} of {each.about}" if each.turn else f"{each.kind} {each.about}"
        for each in check_templates(chat(name))
    }


def test_every_planted_fault_has_its_line() -> None:
    assert set(FAULTS) == set(TEMPLATES)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    lines = found(name)
    assert FAULTS[name] <= lines
    if not any(line.startswith("breaks") for line in FAULTS[name]):
        assert not [line for line in lines if line.startswith("breaks")]


def test_a_sound_template_breaks_and_refuses_nothing() -> None:
    assert found("sound") == {NEWLINE, CALLS}


def test_the_difference_is_shown() -> None:
    (first, *_) = (each for each in check_templates(chat("strips_before_last_question")) if each.kind == "breaks")
    assert "<think>\nOne and two." in first.sampled
    assert "<think>" not in first.rendered
    lines: list[str] = []
    render([first], lines.append)
    assert lines[0].startswith("breaks  turn 1 of 'thoughts, then a question': after turn 1 the template writes")


def test_a_template_that_refuses_everything_says_so() -> None:
    (only,) = check_templates(chat("{{ raise_exception('closed') }}"))
    assert (only.kind, only.about) == ("refuses", "a question")
    assert "closed" in only.message


def test_a_stop_token_that_the_tokenizer_does_not_name_is_noticed() -> None:
    odd = chat(TEMPLATES["sound"].replace("<|im_end|>", "<|end|>"))
    (line,) = (each.message for each in check_templates(odd) if each.about == "the end of a turn")
    assert "set rollout.stop_token_ids" in line


def test_arguments_reach_the_template() -> None:
    thinking = TEMPLATES["sound"] + "{% if add_generation_prompt and think %}<think>{% endif %}"
    with_thoughts = chat(thinking).with_options({"think": True})
    assert "the generation prompt" in {each.about for each in check_templates(with_thoughts)}
    assert "the generation prompt" not in {each.about for each in check_templates(chat(thinking))}


def test_a_folder_with_a_tokenizer_is_enough(tmp_path: Path) -> None:
    tokenizer("trims_content").save_pretrained(tmp_path)
    assert any(each.kind == "breaks" for each in check_templates(load_chat(str(tmp_path))))
    with pytest.raises(PreflightError, match="cannot be loaded"):
        load_chat(str(tmp_path / "nothing"))
    tokenizer("").save_pretrained(tmp_path / "bare")
    with pytest.raises(PreflightError, match="has no chat template"):
        load_chat(str(tmp_path / "bare"))


def test_each_of_several_templates_is_checked(tmp_path: Path) -> None:
    made = chat("sound")
    made.tokenizer.chat_template = {"default": TEMPLATES["sound"], "tool_use": TEMPLATES["trims_content"]}
    breaks = {each.template for each in check_templates(made) if each.kind == "breaks"}
    assert breaks == {"tool_use"}
