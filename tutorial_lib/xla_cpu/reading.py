"""A value that depends on a collective cannot be read before the step.

Read early (`loss.item()`, `print(loss)`), torch-xla would run the tensor's graph by itself, in this
process alone, and the all-reduce of one process is the identity: a wrong number and no error. So
from the first collective of a step up to its boundary torch-xla may execute nothing, and the ways
to read a tensor look at its graph first. What is not among these (`torch.where(mask)`, `bincount`)
ends in torch-xla's own error, "Unexpected execution".
"""

import functools
import re
import warnings
from contextlib import ExitStack
from unittest import mock

import torch
import torch_xla

_XLAC = torch_xla._XLAC

_KINDS = "all_reduce|all_gather|all_to_all|collective_permute|reduce_scatter|send|recv"
_IN_TEXT = re.compile(rf"xla::(cross_replica_sum|{_KINDS})")
_FUNCTIONS = ("is_nonzero", "nonzero", "equal", "allclose", "masked_select", "unique")
_READERS = {
    torch.Tensor: (
        "cpu", "to", "item", "tolist", "numpy", "copy_", "__bool__", "__float__", "__int__",
        "__index__", "__complex__", "__getitem__", "__setitem__", *_FUNCTIONS,
    ),
    torch: _FUNCTIONS,
    _XLAC: ("_xla_get_cpu_tensors", "_xla_sync_multi"),
}  # fmt: skip


class Guard:
    """Stands before the ways to read an XLA tensor while a collective is pending."""

    def __init__(self):
        self._replaced = ExitStack()
        for name in [name for name in dir(_XLAC) if re.match(f"_xla_({_KINDS})", name)]:
            self._replace(_XLAC, name, self._tracing(getattr(_XLAC, name)))
        for owner, names in _READERS.items():
            for name in names:
                self._replace(owner, name, self._reading(getattr(owner, name)))
        # xm.all_reduce over all ranks goes through the dispatcher, which would bypass the
        # replacement above.
        self._library = torch.library.Library("_c10d_functional", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self._library.impl("all_reduce", _all_reduce_of_all, "XLA", allow_override=True)
        self._process_groups = torch.library.Library("c10d", "IMPL")
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and not name.endswith(("barrier", "barrier_")):
                self._process_groups.impl(name, _refuse, "XLA")

    def remove(self) -> None:
        self.open()
        self._library._destroy()
        self._process_groups._destroy()
        self._replaced.close()

    def open(self) -> None:
        """The step is over: nothing that is pending holds a collective."""
        _XLAC._set_allow_execution(True)

    def is_closed(self) -> bool:
        """Whether something that is pending may hold a collective."""
        return not _XLAC._get_allow_execution()

    def _replace(self, owner, name: str, function) -> None:
        self._replaced.enter_context(mock.patch.object(owner, name, function))

    def _tracing(self, function):
        @functools.wraps(function)
        def trace(*args, **kwargs):
            _XLAC._set_allow_execution(False)
            return function(*args, **kwargs)

        return trace

    def _reading(self, function):
        @functools.wraps(function)
        def read(*args, **kwargs):
            if _XLAC._get_allow_execution():
                return function(*args, **kwargs)
            found = _read_by(function.__name__, args, kwargs)
            tensors = [tensor for tensor in found if tensor.device.type == "xla"]
            if not tensors:
                return function(*args, **kwargs)
            _check(tensors)
            _XLAC._set_allow_execution(True)
            try:
                return function(*args, **kwargs)
            finally:
                _XLAC._set_allow_execution(False)

        return read


def _read_by(name: str, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a call brings to the host, if they are on XLA."""
    if name == "to":
        tensor, *target = args
        target += [kwargs[key] for key in ("device", "other") if kwargs.get(key) is not None]
        devices = [t.device if isinstance(t, torch.Tensor) else torch.device(t)
                   for t in target if isinstance(t, (torch.Tensor, torch.device, str))]  # fmt: skip
        return [] if all(device.type == "xla" for device in devices) else [tensor]
    if name == "copy_":
        destination, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
        return [] if destination.device.type == "xla" else [source]
    if name in ("__getitem__", "__setitem__"):
        tensor, index, *value = args
        # How many values a mask selects is a size, which the host has to know.
        parts = index if isinstance(index, tuple) else [index]
        masks = [
            part
            for part in parts
            if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
        ]
        sent = [] if tensor.device.type == "xla" else value
        return masks + [t for t in sent if isinstance(t, torch.Tensor)]
    if name.startswith("_xla"):
        return list(args[0] if args else kwargs["tensors"])
    return [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]


def _check(tensors: list[torch.Tensor]) -> None:
    needed = _XLAC._check_tensor_need_materialization(tensors)
    pending = [tensor for tensor, need in zip(tensors, needed) if need]
    if pending and _IN_TEXT.search(_XLAC._get_xla_tensors_text(pending)):
        shapes = ", ".join(str(tuple(t.shape)) for t in pending)
        raise RuntimeError(
            f"the value of an XLA tensor of shape {shapes} depends on a collective of this step, "
            "which has not run: call mark_step() (torch_xla.sync()) on every rank first, then read "
            "the value"
        )


def _all_reduce_of_all(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    result = _XLAC._xla_all_reduce(reduce_op, tensor, 1.0, [], False)
    return torch._from_functional_tensor(result) if torch._is_functional_tensor(result) else result


def _refuse(*args, **kwargs):
    """In place of the collectives of `torch.distributed`: on XLA tensors they would reduce a copy
    and lose the result.
    """
    raise RuntimeError(
        "torch.distributed cannot reduce XLA tensors between CPU processes: use "
        "tutorial_lib.parallel_layers.comm or torch_xla.core.xla_model, whose collectives are "
        "traced, or copy the tensor to the host first"
    )
