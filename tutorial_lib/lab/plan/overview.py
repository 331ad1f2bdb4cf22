"""A plan to be read: tables."""

from tutorial_lib.lab.show.tables import Table, size, table, text

from .choices import scaled, smallest_tensor_parallel, switches
from .plan import Plan


def held(plan: Plan) -> Table:
    """What a core holds, beside what it has."""
    rows = [{"what": kind, "bytes": round(n), "": size(n)} for kind, n in plan.nbytes.items()]
    rows.append({"what": "together", "bytes": round(plan.total_bytes), "": size(plan.total_bytes)})
    rows.append(
        {"what": "a core has", "bytes": round(plan.instance.memory), "": size(plan.instance.memory)}
    )
    return table(rows, "A core holds")


def said(plan: Plan) -> Table:
    """Collectives of a step by axis and kind."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for c in plan.collectives:
        row = found.setdefault((c.axis, c.kind, c.group_size), [0, 0.0])
        row[0] += 1
        row[1] += c.bytes_sent
    return table(
        [
            {
                "axis": axis,
                "collective": kind,
                "ranks": ranks,
                "times": int(count),
                "a rank sends": size(sent),
            }
            for (axis, kind, ranks), (count, sent) in sorted(found.items())
        ],
        "Collectives of a step",
    )


def bounds(plan: Plan) -> Table:
    """The three times, and what they allow."""
    rows = [{"bound": name, "seconds a step": f"{time:.3g}"} for name, time in plan.times.items()]
    caption = (
        f"A step of {plan.run.sequences:,} sequences takes {plan.step_time:.3g} s at least "
        f"({plan.bound}): {plan.throughput:.3g} sequences/s at most, "
        f"{plan.throughput_in_turn:.3g} if nothing overlaps"
    )
    return table(rows, caption)


def other_choices(plan: Plan) -> Table:
    """What each switch would save or cost."""
    sent = sum(plan.bytes_sent().values())
    rows = []
    for name, other in {"as planned": plan, **switches(plan)}.items():
        traffic = sum(other.bytes_sent().values())
        rows.append(
            {
                "choice": name,
                "a core holds": size(other.total_bytes),
                "fits": "yes" if other.fits else "no",
                "operations": _change(other.operations, plan.operations),
                "bytes sent": _change(traffic, sent) if sent else size(traffic),
                "sequences/s at most": float(f"{other.throughput:.3g}"),
            }
        )
    return table(rows, "One choice changed")


def _change(new: float, old: float) -> str:
    """By how many percent `new` is above `old`; adding zero makes a plus of minus zero."""
    return f"{round(100 * (new / old - 1), 1) + 0.0:+.1f} %"


def scaling(plan: Plan, nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 256, 1000)) -> Table:
    """Sequences a second on more nodes, with the same work for each rank."""
    return table(
        [
            {
                "nodes": p.nodes,
                "ranks": p.run.world_size,
                "sequences a step": p.run.sequences,
                "bound": p.bound,
                "sequences/s at most": text(float(f"{p.throughput:.4g}")),
                "if nothing overlaps": text(float(f"{p.throughput_in_turn:.4g}")),
            }
            for p in scaled(plan, nodes)
        ],
        "More nodes",
    )


def report(plan: Plan) -> str:
    """All of it as text."""
    run, smallest = plan.run, smallest_tensor_parallel(plan)
    fits = "fits" if plan.fits else "does not fit"
    head = (
        f"{run.family} on {plan.nodes} × {plan.instance.name}: tensor parallel {run.tp}, "
        f"data parallel {run.dp}: {fits}\n"
        f"Smallest tensor-parallel size that fits on these cores: {smallest or 'none'}"
    )
    parts = [held(plan), said(plan), bounds(plan), other_choices(plan)]
    if not plan.instance.cores % run.tp:
        parts.append(scaling(plan))
    return "\n\n".join([head, *map(repr, parts)])
