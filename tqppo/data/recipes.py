"""How rows of well-known datasets become rows for training, with the columns of verl that `data.train` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqppo.errors import DataError

SourceRow = Mapping[str, object]
Converted = tuple[str, str]  # question, reference answer
NUMBER_RULE = 'Reason step by step. Write the final number on the last line, after "####".'
BOXED_RULE = "Reason step by step. Write the final answer inside \\boxed{}."
CODE_RULE = "Answer with one Python function in a code block."


@dataclass(frozen=True, slots=True)
class Recipe:
    """A dataset of the hub, the folder that presets expect, the rows' source and their conversion."""

    repository: str
    inside: str  # folder of its files in the repository
    folder: str
    source: str
    convert: Callable[[SourceRow], Converted]
    unnamed: str = "train"  # split used when the file name has none

    def row(self, row: SourceRow, split: str, index: int) -> dict[str, object]:
        """A row with verl's columns. Rows that have them already keep prompt, source and answer."""
        extra = {"split": split, "index": index}
        if "prompt" in row and isinstance(answer := row.get("reward_model"), Mapping):
            truth = {"style": "rule", "ground_truth": str(answer.get("ground_truth"))}
            source = str(row.get("data_source") or self.source)
            return {"data_source": source, "prompt": row["prompt"], "reward_model": truth, "extra_info": extra}
        question, reference = self.convert(row)
        return {
            "data_source": self.source,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": reference},
            "extra_info": extra,
        }


def _text(row: SourceRow, *names: str) -> str:
    """The first of these columns that the row has."""
    for name in names:
        if isinstance(value := row.get(name), str):
            return value
    raise DataError(f"a row has none of the columns {', '.join(names)}, only {', '.join(map(str, row))}")


def _gsm8k(row: SourceRow) -> Converted:
    question, answer = _text(row, "question"), _text(row, "answer")
    marked = re.findall(r"####\s*(.+)", answer)
    if not marked:
        raise DataError(f'the answer to {question!r:.60} has no "####" before its number')
    return f"{question}\n\n{NUMBER_RULE}", marked[-1].strip().replace(",", "")


def _math(row: SourceRow) -> Converted:
    problem = _text(row, "problem", "question")
    answer = row.get("answer")
    return f"{problem}\n\n{BOXED_RULE}", answer if isinstance(answer, str) else boxed(_text(row, "solution"))


def boxed(solution: str) -> str:
    """The content of the last \\boxed{…} of a solution, whose braces may nest."""
    start = solution.rfind("\\boxed{")
    if start < 0:
        raise DataError(f"a solution has no \\boxed{{…}}: {solution!r:.60}")
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        if depth < 0:
            return solution[begin:at]
    raise DataError(f"a \\boxed{{ is not closed: {solution[start:]!r:.60}")


def _code(row: SourceRow) -> Converted:
    """The reference is the list of tests as JSON, which the reward `code` runs."""
    asked, tests = _text(row, "text", "prompt"), row.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise DataError(f"the column test_list of {asked!r:.60} has no tests")
    shown = "\n".join(map(str, tests))
    return f"{asked}\n\nIt must pass:\n{shown}\n\n{CODE_RULE}", json.dumps([str(test) for test in tests])


RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe("openai/gsm8k", "main/", "data/gsm8k", "openai/gsm8k", _gsm8k),
    "dapo-math": Recipe("BytedTsinghua-SIA/DAPO-Math-17k", "data/", "data/dapo-math", "math_dapo", _math),
    "aime-2024": Recipe("BytedTsinghua-SIA/AIME-2024", "data/", "data/aime-2024", "aime_2024", _math, unnamed="test"),
    "math": Recipe("DigitalLearningGmbH/MATH-lighteval", "", "data/math", "math", _math),
    "code": Recipe("google-research-datasets/mbpp", "full/", "data/code", "code", _code),
}


def command_for(file: Path) -> str:
    """The command that makes a file which presets name, such as `data/gsm8k/train.parquet`; empty for other files."""
    for name, recipe in RECIPES.items():
        own = Path(recipe.folder)
        if file.suffix == ".parquet" and file.parent.parts[-len(own.parts) :] == own.parts:
            elsewhere = "" if file.parent == own else f" --out {file.parent}"
            return f"tqppo data get {name}{elsewhere}"
    return ""
