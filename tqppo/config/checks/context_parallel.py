"""Ranks that compute rows together: their number divides the ranks and the model's attention heads."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.checks.registry import Context, check, nearest_numbers
from tqppo.config.diagnostics import Diagnostic
from tqppo.config.facts import model_shape, section_of, worker_roles
from tqppo.config.plan.shapes import shape_of

WITHOUT_KERNEL = ("auto", "sdpa")  # context parallelism has an attention of its own


@check("mode", "model.*", "actor.*", "critic.*", "reference.*", "reward_model.*", "algorithm.*")
def ranks_can_share_rows(context: Context) -> Iterator[Diagnostic]:
    config = context.config
    for role, ranks in worker_roles(config).items():
        together, key = section_of(config, role).context_parallel, f"{role}.context_parallel"
        if together == 1:
            continue
        if ranks % together:
            yield context.report(
                "E213",
                f"{role}: {ranks} ranks are no whole number of groups of {together}",
                (key, f"{role}.ranks"),
                found=f"{role}.ranks = {ranks}",
                fix=f"set {key} = {_divisors(ranks, together)}, or {role}.ranks = {-(-ranks // together) * together}",
            )
        path = str(getattr(section_of(config, role), "path", ""))
        shape = shape_of(path) if path else model_shape(config)
        if shape is not None and shape.heads % together:
            yield context.report(
                "E214",
                f"{role}: {together} ranks cannot share the {shape.heads} attention heads of the model evenly",
                (key, f"{role}.path" if path else "model.path"),
                allowed=f"a divisor of {shape.heads}",
                fix=f"set {key} = {_divisors(shape.heads, together)}",
            )
        if config.model.attention not in WITHOUT_KERNEL:
            yield context.report(
                "E303",
                f"model.attention has no effect on {role}: ranks that share rows have an attention of their own",
                ("model.attention", key),
                fix=f"delete model.attention, or set {key} = 1",
            )


def _divisors(number: int, wanted: int) -> str:
    return nearest_numbers(wanted, lambda n: number % n == 0, at_most=number)
