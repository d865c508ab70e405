"""The plan as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from tqppo.config.placement import placement_text
from tqppo.config.plan.budget_text import budget_text
from tqppo.config.plan.memory import total
from tqppo.config.plan.plan import Plan
from tqppo.config.plan.roles import PlannedRole
from tqppo.units import size


def plan_text(plan: Plan, *, formulas: bool = False) -> str:
    lines = [*_head(plan), "", *_step(plan), "", *_roles(plan, formulas), "", *_devices(plan), *_teachers(plan)]
    lines += [*budget_text(plan.budget, formulas=formulas), "", *_files(plan)]
    if not formulas:
        lines += ["", "Memory is an estimate (±10 % of a worker with its model); --explain shows the formulas."]
    return "\n".join(lines) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    parameters = f"{plan.parameters:,} parameters" if plan.parameters else "no config.json here, and not a known name"
    yield f"mode     {plan.mode}, {plan.steps} steps"
    yield f"model    {plan.model} ({parameters})"
    yield f"engine   {plan.engine}"
    yield f"storage  {plan.storage}"
    if max(plan.threads.values()) > 1:
        each = ", ".join(f"{role} {number}" for role, number in plan.threads.items())
        yield f"threads  {each} (each process; {_count(plan.cores, 'core')})"


def _step(plan: Plan) -> Iterator[str]:
    padded = f", padded with {plan.padding} to a multiple of {plan.multiple}" if plan.padding else ""
    rows = f"{plan.rows} rows" if plan.trajectories == 1 else f"{plan.rows} to {plan.rows * plan.trajectories} rows"
    yield f"A step: {_count(plan.prompts, 'prompt')} × {_count(plan.sessions, 'session')} = {rows}{padded}"
    if plan.trajectories > 1:
        yield f"        a session is 1 to {plan.trajectories} trajectories, a row each"
    yield f"        rows of at most {plan.tokens} tokens"
    for role, updates in plan.updates.items():
        minis = plan.mini_batches[role]
        passes = f" × {updates // minis} epochs" if updates != minis else ""
        total = f"{updates * plan.steps:,} over the run"
        yield f"        {role}: {_count(minis, 'mini-batch')}{passes} = {_count(updates, 'update')} ({total})"
    width = max(len(stage.name) for stage in plan.stages)
    for stage in plan.stages:
        written = "+ " + ", ".join(stage.writes) if stage.writes else "  reads " + ", ".join(stage.reads)
        yield f"  {stage.name:<{width}}  {written}"
    if plan.ahead:
        yield from _ahead(plan)


def _ahead(plan: Plan) -> Iterator[str]:
    later, when = plan.ahead, "while" if plan.side_by_side else "in one process: before"
    yield f"        {when} the other stages compute step N, the engines sample step N + {later}"
    yield f"        step N trains on groups of the weights after step N − {later + 1}"


def _roles(plan: Plan, formulas: bool) -> Iterator[str]:
    rows = [("role", "processes", "devices", "memory each", "model")]
    rows += [(r.name, str(r.processes), r.devices, role_total(r), r.model) for r in plan.roles]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for i, row in enumerate(rows):
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:4], widths, strict=True))
        yield f"{cells}  {row[4]}".rstrip()
        role = plan.roles[i - 1] if i else None
        for part in role.memory if role and formulas else ():
            yield f"    {part.name:<18} {size(part.num_bytes):>9}  {part.formula}"


def _devices(plan: Plan) -> Iterator[str]:
    lines = list(placement_text(plan.placement))
    yield from [*lines, ""] if lines else []


def _teachers(plan: Plan) -> Iterator[str]:
    distillation = plan.distillation
    if distillation is None:
        return
    reward = ", with the task's reward" if distillation.task_reward else ""
    yield f"Distillation: {distillation.loss}, {distillation.update.replace('_', ' ')}{reward}"
    sizes = distillation.bytes_per_token
    if sizes:
        columns = " + ".join(f"{name} {number}" for name, number in sizes.items())
        total = f" = {sum(sizes.values())}" if len(sizes) > 1 else ""
        yield f"        {columns}{total} bytes per token"
    rows = [("teacher", "engine", "replicas", "devices", "context", "scores", "model")]
    for each in distillation.teachers:
        scores = f"{distillation.route_by} {', '.join(each.scores)}" if each.scores else "every row"
        model = f"{each.model}, which reads {each.prompt!r}" if each.prompt else each.model
        context = f"{each.context_tokens} tokens"
        rows.append((each.name, each.engine, str(each.replicas), each.devices, context, scores, model))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    for row in rows:
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:6], widths, strict=True))
        yield f"  {cells}  {row[6]}".rstrip()
    yield ""


def role_total(role: PlannedRole) -> str:
    return size(total(role.memory)) if role.memory else "unknown"


def _files(plan: Plan) -> Iterator[str]:
    yield "It writes:"
    width = max(len(path) for path, _ in plan.files)
    yield from (f"  {path:<{width}}  {what}" for path, what in plan.files)


def _count(n: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("h") else f"{word}s"
    return f"{n} {word if n == 1 else plural}"
