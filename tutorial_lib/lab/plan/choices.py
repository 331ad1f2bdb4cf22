"""What another choice would save or cost."""

from collections.abc import Iterable
from dataclasses import replace

from tutorial_lib.parallel_layers.utils import ensure_positive

from .plan import Plan
from .runs import MODELS


def _with(plan: Plan, **changes) -> Plan | None:
    """The plan with other choices; None where they are impossible."""
    try:
        other = replace(plan, run=plan.run.change(**changes))
        other.total_bytes  # noqa: B018  not every model has a closed form for every choice
        return other
    except ValueError:
        return None


def with_tensor_parallel(plan: Plan, tp: int) -> Plan | None:
    """The same cores and sequences a step with another tensor-parallel size; None where that is
    impossible.

    Raises:
        ValueError: `tp` is not a positive integer.
    """
    ensure_positive(tp=tp)
    run = plan.run
    if run.world_size % tp:
        return None
    dp = run.world_size // tp
    accumulation, rest = divmod(run.sequences, dp * run.micro_batch)
    if rest or not accumulation:
        return None
    return _with(plan, tp=tp, dp=dp, accumulation=accumulation)


def smallest_tensor_parallel(plan: Plan) -> int | None:
    """The smallest tensor-parallel size that fits into a core's memory, on the same cores; None if
    none does.
    """
    for tp in range(1, plan.run.world_size + 1):
        other = with_tensor_parallel(plan, tp)
        if other is not None and other.fits:
            return tp
    return None


def switches(plan: Plan) -> dict[str, Plan]:
    """The plans that differ from this one by one choice, by its name."""
    run = plan.run
    tried = {
        f"checkpointing {kind}": dict(checkpointing=kind)
        for kind in MODELS[run.family].checkpointed
        if kind != run.checkpointing
    }
    for name in ("sequence_parallel", "zero", "float32_gradients"):
        called = "ZeRO-1" if name == "zero" else name.replace("_", " ")
        on = getattr(run, name)
        tried[f"{'without' if on else 'with'} {called}"] = {name: not on}
    if run.zero:
        tried["without ZeRO-1"]["float32_gradients"] = False
    if run.accumulation % 2 == 0:
        halved = dict(micro_batch=2 * run.micro_batch, accumulation=run.accumulation // 2)
        tried["micro-batches twice as large"] = halved
    found = {name: _with(plan, **changes) for name, changes in tried.items()}
    for tp in (run.tp // 2, 2 * run.tp):
        found[f"tensor parallel {tp}"] = with_tensor_parallel(plan, tp) if tp else None
    return {name: other for name, other in found.items() if other is not None}


def scaled(plan: Plan, nodes: Iterable[int]) -> list[Plan]:
    """The same work for each rank on other numbers of nodes: more data-parallel replicas.

    Raises:
        ValueError: a number of nodes that does not hold a whole number of replicas.
    """
    plans = []
    for count in nodes:
        dp, rest = divmod(count * plan.instance.cores, plan.run.tp)
        if rest or dp < 1:
            raise ValueError(
                f"{count} nodes of {plan.instance.cores} cores hold no whole number of "
                f"{plan.run.tp} ranks"
            )
        plans.append(replace(plan, run=plan.run.change(dp=dp)))
    return plans
