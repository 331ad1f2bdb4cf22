"""A plan or a dry run to be read: tables."""

from collections import Counter
from collections.abc import Iterable, Mapping

from tutorial_lib.lab.show.tables import Table, size, table, text
from tutorial_lib.parallel_layers.comm import Collective

from .choices import scaled, smallest_tensor_parallel, switches
from .plan import Plan

NODES = (1, 2, 4, 8, 16, 64, 256, 1000)


def held(nbytes: Mapping[str, float], caption: str, memory: float | None = None) -> Table:
    """What a rank holds, beside the memory that its core has."""
    rows = dict(nbytes) | {"together": sum(nbytes.values())}
    if memory is not None:
        rows["a core has"] = memory
    return table([{"what": k, "bytes": round(n), "": size(n)} for k, n in rows.items()], caption)


def sent(collectives: Iterable[Collective]) -> Table:
    """Collectives of a step by axis, kind and size of the group."""
    count, nbytes = Counter(), Counter()
    for one in collectives:
        key = one.axis, one.kind, one.group_size
        count[key] += 1
        nbytes[key] += one.bytes_sent
    columns = ["axis", "collective", "ranks", "times", "bytes sent"]
    rows = [[*key, count[key], round(nbytes[key])] for key in sorted(count)]
    return Table(columns, rows, "Collectives of a step")


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
    rows = [
        {
            "choice": name,
            "a core holds": size(other.total_bytes),
            "fits": other.fits,
            "FLOPs": _change(other.operations, plan.operations),
            "bytes sent": _change(other.bytes_sent, plan.bytes_sent),
            "sequences/s at most": float(f"{other.throughput:.3g}"),
        }
        for name, other in {"as planned": plan, **switches(plan)}.items()
    ]
    return table(rows, "One choice changed")


def _change(new: float, old: float) -> str:
    """By how many percent `new` is above `old`; adding zero makes a plus of minus zero."""
    return f"{round(100 * (new / old - 1), 1) + 0.0:+.1f} %" if old else size(new)


def scaling(plan: Plan) -> Table:
    """Sequences a second on more nodes, with the same work for each rank."""
    rows = [
        {
            "nodes": p.nodes,
            "ranks": p.run.world_size,
            "sequences a step": p.run.sequences,
            "bound": p.bound,
            "sequences/s at most": text(float(f"{p.throughput:.4g}")),
            "if nothing overlaps": text(float(f"{p.throughput_in_turn:.4g}")),
        }
        for p in scaled(plan, NODES)
    ]
    return table(rows, "More nodes")


def report(plan: Plan) -> str:
    """All of it as text."""
    run, smallest = plan.run, smallest_tensor_parallel(plan)
    head = (
        f"{run.family} on {plan.nodes} × {plan.instance.name}: tensor parallel {run.tp}, "
        f"data parallel {run.dp}: {'fits' if plan.fits else 'does not fit'}\n"
        f"Smallest tensor-parallel size that fits on these cores: {smallest or 'none'}"
    )
    holds = held(plan.nbytes, "A core holds", plan.instance.memory)
    shown = [holds, sent(plan.collectives), bounds(plan), other_choices(plan)]
    if not plan.instance.cores % run.tp:
        shown.append(scaling(plan))
    return "\n\n".join([head, *map(repr, shown)])
