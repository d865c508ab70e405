"""Student and teachers have one vocabulary: token ids travel between them as they are."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.registry import Context, check
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import has_teachers, model_shape, named_models
from tqppo.config.plan.shapes import shape_of
from tqppo.config.read.vocabulary import Vocabulary, differences, vocabulary_of

SHOWN = 3
PADDING = 1024  # sizes of one family differ by the rounding of the embedding


@check("mode", "teachers.*", "model.*", "distillation.check_vocabulary")
def vocabularies_agree(context: Context) -> Iterator[Diagnostic]:
    """Compares the tokenizers' files, or the sizes of the models where there are no files to read."""
    config = context.config
    if not has_teachers(config) or not config.distillation.check_vocabulary:
        return
    own = vocabulary_of(config.model.tokenizer or config.model.path)
    for name, path in named_models(config).items():
        other = vocabulary_of(path)
        if own is not None and other is not None:
            yield from compare(context, name, own, other)
        else:
            yield from _compare_sizes(context, name, path)


def compare(
    context: Context, name: str, own: Vocabulary, other: Vocabulary, *, code: str = "E511"
) -> Iterator[Diagnostic]:
    """The problems of one teacher's vocabulary; `--probe` calls it with the vocabularies of loaded tokenizers."""
    keys = (f"teachers.{name}.path", "model.path")
    found = differences(own, other)
    if found:
        first = "\n".join(str(each) for each in found[:SHOWN]) + ("\n…" if len(found) > SHOWN else "")
        yield context.report(
            code,
            f"teacher {name} and the student disagree on {len(found)} token{'s' if len(found) > 1 else ''}",
            keys,
            found=f"vocabulary {other.fingerprint}, the student's is {own.fingerprint}\n{first}",
            allowed="a teacher with the student's vocabulary and special tokens",
            fix="choose a teacher of the student's family, or set distillation.check_vocabulary = false",
        )
    elif own.end and other.end and own.end != other.end:
        yield context.report(
            "W515",
            f'teacher {name} ends its answers with "{other.end}" and the student with "{own.end}"',
            keys,
            fix="the teacher may never expect the student's end: choose two chat models, or two base models",
        )


def _compare_sizes(context: Context, name: str, path: str) -> Iterator[Diagnostic]:
    own, other = model_shape(context.config), shape_of(path)
    if own is not None and other is not None and abs(other.vocabulary - own.vocabulary) > PADDING:
        yield context.report(
            "E511",
            f"teacher {name} has {other.vocabulary} tokens and the student {own.vocabulary}: two tokenizers",
            (f"teachers.{name}.path", "model.path"),
            allowed="a teacher with the student's vocabulary",
            fix="choose a teacher of the student's family, or set distillation.check_vocabulary = false",
        )
