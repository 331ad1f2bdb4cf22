"""Judges an answer: a value beside the right value, or a function or class run on several inputs
beside the right one.

The same code runs in the notebook's process and, for answers that communicate, on every rank.
"""

import dis
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Real
from typing import Any

import torch
from torch.utils._pytree import tree_map

NOT_ATTEMPTED, CORRECT = "not attempted", "correct"
MAX_SHOWN = 90  # characters of an input or a result


@dataclass(frozen=True)
class Exercise:
    """What an answer is compared with.

    Attributes:
        right: the right value, function or class.
        wrong: usual wrong ones, by what to say about them. An answer that behaves like one of them
            on all inputs gets its reason.
        inputs: the arguments of each trial; None if the answer is a value.
        use: calls an answer with the arguments of a trial and returns what is compared: numbers,
            tensors, or lists and dictionaries of them. A key whose right value is False names a
            fault.
        tolerance: largest difference of two elements, relative to the larger one if above 1.
    """

    right: Any
    wrong: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[tuple] | None = None
    use: Callable = lambda answer, *arguments: answer(*arguments)
    tolerance: float = 1e-4


def named(name: str, namespace: Mapping[str, Any]) -> Exercise:
    """The exercise `module.function` of this package, made with the notebook's variables."""
    module, _, function = name.rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), function)(namespace)


def judge_on_rank(namespace: Mapping[str, Any], name: str, exercise: str) -> str:
    """The ranks' common verdict on what they hold under this name. Every rank has to call it."""
    from tutorial_lib.parallel_layers import parallel_state

    def of_all_ranks(value: Any) -> list:
        group = parallel_state.get_world_group()
        return parallel_state.gather_python_object(value, group)

    missing = [rank for rank, held in enumerate(of_all_ranks(name in namespace)) if not held]
    if missing:
        return f"{name} is not defined on rank {missing[0]}: run its cell, and what it needs above"
    return judge(name, namespace[name], named(exercise, namespace), of_all_ranks)


def judge(
    name: str,
    answer: Any,
    exercise: Exercise,
    of_all: Callable[[Any], list] = lambda value: [value],
) -> str:
    """`not attempted`, `correct`, or what is wrong with an answer.

    Args:
        name: of the answer, for the verdict.
        of_all: the values of all ranks, in their order, where several judge together.
    """
    if all(of_all(_blank(answer))):
        return NOT_ATTEMPTED
    if exercise.inputs is not None and not all(of_all(callable(answer))):
        return f"not yet: {name} has to be a function"
    trials = [()] if exercise.inputs is None else exercise.inputs
    found = [_result(answer, exercise, trial) for trial in trials]
    right = [_result(exercise.right, exercise, trial) for trial in trials]
    faults = [_fault(*pair, exercise.tolerance) for pair in zip(found, right)]
    pairs = zip(trials, found, faults)
    verdicts = of_all(
        next((_verdict(name, *pair, exercise) for pair in pairs if pair[2] is not None), "")
    )
    if not any(verdicts):
        return CORRECT
    for reason, wrong in exercise.wrong.items():
        same = [
            _fault(one, _result(wrong, exercise, trial), exercise.tolerance) is None
            for one, trial in zip(found, trials)
        ]
        if all(of_all(all(same))):
            return f"not yet: {reason}"
    rank, verdict = next(pair for pair in enumerate(verdicts) if pair[1])
    return f"{verdict} (on rank {rank})" if len(verdicts) > 1 else verdict


def _verdict(name: str, trial: tuple, result: Any, fault: str, exercise: Exercise) -> str:
    """What is wrong in a trial."""
    if exercise.inputs is None:
        return f"not yet: {fault}" if fault else "not yet"
    call = f"{name}({', '.join(map(_short, trial))})"
    if isinstance(result, Mapping) and fault:  # which names the entry
        return f"not yet: {call}: {fault}"
    return f"not yet: {call} gave {_short(result)}{fault and ': '}{fault}"


def _result(answer: Any, exercise: Exercise, trial: tuple) -> Any:
    """What an answer gives in a trial, on the host; its arguments are copies."""
    if exercise.inputs is None:
        return answer
    from tutorial_lib.backends import mark_step

    result = exercise.use(answer, *tree_map(_copy, trial))
    mark_step()
    return tree_map(lambda x: x.cpu().detach() if isinstance(x, torch.Tensor) else x, result)


def _copy(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)


def _blank(answer: Any) -> bool:
    """Nothing filled in: None, `...`, as many of them as there are parts, or a function or class
    with an empty body.
    """
    if isinstance(answer, (list, tuple)):
        return bool(answer) and all(part is None or part is ... for part in answer)
    if inspect.isclass(answer):
        held = {name: getattr(what, "__func__", what) for name, what in vars(answer).items()}
        own = [what for name, what in held.items() if inspect.isfunction(what) or name[0] != "_"]
        return all(inspect.isfunction(what) and _blank(what) for what in own)
    if inspect.isfunction(answer):
        code = [i for i in dis.get_instructions(answer) if i.opname not in ("RESUME", "NOP")]
        return code[-1].opname.startswith("RETURN") and len(code) <= 2 and code[0].argval is None
    return answer is None or answer is ...


def _fault(found: Any, right: Any, tolerance: float) -> str | None:
    """None if they are the same, else what separates them, without telling the right answer."""
    if found is None and right is not None:
        return ""
    if isinstance(right, Mapping):
        if not isinstance(found, Mapping) or found.keys() != right.keys():
            return "it has to be a dictionary with the keys " + ", ".join(map(str, right))
        for key, wanted in right.items():
            fault = _fault(found[key], wanted, tolerance)
            if fault is not None:
                return key if wanted is False else f"{key}: {fault or 'not right'}"
        return None
    if isinstance(right, (list, tuple)):
        return _fault_of_list(found, right, tolerance)
    if isinstance(right, torch.Tensor):
        return _fault_of_tensor(found, right, tolerance)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(right, Real) and not isinstance(right, bool):
        if not isinstance(found, Real):
            return f"{_short(found)} is not a number"
        return None if found == right or _rounded(found, right) else ""
    return None if found == right else ""


def _fault_of_list(found: Any, right: Sequence, tolerance: float) -> str | None:
    found = found.tolist() if isinstance(found, torch.Tensor) else found
    if not isinstance(found, (list, tuple)):
        return "it has to be a list"
    if any(part is None or part is ... for part in found) and None not in right:
        return "a part of it is missing"
    if len(found) != len(right):
        return f"it has {len(found)} entries, too {'many' if len(found) > len(right) else 'few'}"
    faults = [_fault(*pair, tolerance) for pair in zip(found, right)]
    fault = next((fault for fault in faults if fault is not None), None)
    simple = all(isinstance(part, Real) for part in [*found, *right])
    if fault is not None and simple and sorted(found) == sorted(right):
        return "the right numbers in another order"
    return fault


def _fault_of_tensor(found: Any, right: torch.Tensor, tolerance: float) -> str | None:
    try:
        found = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return "it has to be a tensor"
    if found.shape != right.shape:
        return f"its shape {tuple(found.shape)} has to be {tuple(right.shape)}"
    same = torch.allclose(found.double(), right.double(), rtol=tolerance, atol=tolerance)
    return None if same else ""


def _rounded(found: float, right: float) -> bool:
    """Whether `found` is `right`, rounded to two digits or more; a count has to be exact."""
    if isinstance(right, int) or not (math.isfinite(found) and math.isfinite(right)):
        return False
    if not found or not right:
        return False
    digits = next(n for n in range(1, 18) if n == 17 or float(f"{found:.{n}e}") == found)
    unit = 10.0 ** (math.floor(math.log10(abs(right))) - min(digits, 3))
    return abs(found - right) <= unit / 2 * (1 + 1e-9)


def _short(value: Any) -> str:
    """A value as a verdict shows it: small tensors by their elements, large ones by their shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 12:
            return f"a tensor {tuple(value.shape)}"
        return _short(value.tolist())
    if isinstance(value, (list, tuple)):
        shown = f"[{', '.join(map(_short, value))}]"
    elif isinstance(value, Mapping):
        shown = "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, float):
        shown = f"{value:.4g}"
    elif isinstance(value, torch.distributed.ProcessGroup):
        shown = f"group of {value.size()}"
    else:
        shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]} …"
