"""Compares an engine's weights with the published ones, tensor by tensor: the same bits, not similar results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tqppo.errors import EngineError
from tqppo.weights.checksum import added

Checksums = Mapping[str, str]  # by the tensor's name
SHOWN = 4


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What one process of an engine has: checksums of tensors as they came, and of its parameters as they are now.

    `parts` names the published modules that the engine joins into one: `{"qkv_proj": ["q_proj", …]}`.
    """

    held: Checksums
    given: Checksums | None = None  # None: it read its parameters from elsewhere
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)


def check_identity(engine: str, published: Checksums, reports: Sequence[WeightReport]) -> int:
    """Raise `EngineError` that names the tensors whose bits differ; returns how many parameters were compared.

    Each process of the engine has a whole parameter, or all of them together have one.
    """
    found = list(_compare_given(published, reports))
    compared = 0
    for name in sorted({name for report in reports for name in report.held}):
        expected = _expected(name, published, reports[0].parts)
        held = [report.held[name] for report in reports if name in report.held]
        if not expected or expected.partition(":")[0] != held[0].partition(":")[0]:
            continue  # a parameter of the engine's own, or in another type
        compared += 1
        if set(held) != {expected} and added(held) != expected:
            found.append(name)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise EngineError(
            f"{engine} does not have the weights that were published: {', '.join(found[:SHOWN])}{more} of "
            f"{len(published)} tensors differ in their bits. rollout.verify_weights = false turns the check off"
        )
    return compared


def _compare_given(published: Checksums, reports: Sequence[WeightReport]) -> Iterator[str]:
    for report in reports:
        if report.given is not None:
            yield from (name for name in published if report.given.get(name) != published[name])


def _expected(name: str, published: Checksums, parts: Mapping[str, Sequence[str]]) -> str:
    """The checksum that a parameter of the engine must have; empty if the trainer publishes nothing like it."""
    if name in published:
        return published[name]
    for joined, modules in parts.items():
        names = [name.replace(f".{joined}.", f".{module}.") for module in modules]
        if f".{joined}." in name and all(each in published for each in names):
            return added([published[each] for each in names])
    return ""
