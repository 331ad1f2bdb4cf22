"""Which tensors are pending, and how one gets its result.

torch-xla knows its live tensors, but hands none to Python. The garbage collector does: every tensor
that Python can reach is one of its objects. What C++ alone holds (activations saved for backward, a
view's base) hangs on one of these.
"""

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch_xla

from .saved import PackedTensors, saved_for_backward

_XLAC = torch_xla._XLAC
_functionalization = torch._C._functionalization
_WHOLE = _functionalization.detach_ViewMeta, _functionalization.alias_ViewMeta
_OLDEST = 2  # the collector's generation of objects that stay


class LiveTensors:
    """The XLA tensors that Python can reach, without a look at all of the half a million objects of
    a process.

    An object enters the collector's oldest generation only in a collection of the one before (or of
    all). So it is enough to note the tensors of the younger generations each time that one starts.

    Tensors in a dead cycle (a graph that a hook's closure refers to, say) would stay pending until
    the collector runs: on one rank and not on another, in one run and not in the next, and with
    them their collectives. So it runs at each step's boundary, and at no other time.
    """

    def __init__(self):
        # By id; in a WeakSet a tensor would be compared, an operation on it.
        self._old: dict[int, weakref.ref] = {}
        gc.collect()
        self._note(gc.get_objects())
        gc.freeze()  # modules, functions, …: no later collection has to look at them
        gc.callbacks.append(self._before_collection)
        self._collects = gc.isenabled()
        gc.disable()

    def close(self) -> None:
        gc.callbacks.remove(self._before_collection)
        gc.unfreeze()
        if self._collects:
            gc.enable()

    def _before_collection(self, phase: str, info: dict) -> None:
        if phase == "start" and info["generation"] >= _OLDEST - 1:
            for generation in range(_OLDEST):
                self._note(gc.get_objects(generation))

    def _note(self, objects: list) -> None:
        # Touch none of them: a collection may start while a tensor is half made.
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
        self._old |= {id(obj): weakref.ref(obj) for obj in objects if type(obj) in kinds}

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Those that were noted by the last collection, which every object has been through, and
        whose memory is not about to go.

        A thread that drops the last reference to a tensor from C++ waits for Python's lock before
        it frees the memory. That tensor has a use count of zero and must not be taken, so no other
        thread gets the lock in here.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        try:
            found = [(key, reference, reference()) for key, reference in self._old.items()]
            self._old = {key: reference for key, reference, tensor in found if tensor is not None}
            alive = [t for *_, t in found if t is not None and t._use_count() > 0]
            for tensor in alive:
                tensor._fix_weakref()  # torch wants this when Python takes an object back from C++
        finally:
            sys.setswitchinterval(interval)
        return iter([tensor for tensor in alive if tensor.device.type == "xla"])


def count_pending(device: str) -> int:
    """How many tensors of the device still are a graph, whoever holds them."""
    return sum(_XLAC._check_device_tensor_need_materialization(device))


Pending = dict[int, list[torch.Tensor]]


def find_pending(live: LiveTensors, packed: PackedTensors, device: str) -> tuple[Pending, set[int]]:
    """The pending tensors by torch-xla's id, in the order in which they were traced. Tensors of one
    id are aliases.

    Second, the storages that will have their whole value after the step, so that a view of one can
    stay one.
    """
    gc.collect()  # see LiveTensors
    if not count_pending(device):
        return {}, set()
    pending: Pending = defaultdict(list)
    seen: dict[int, torch.Tensor] = {}  # holds them, so that no id is used twice
    _add(pending, seen, _with_held_by_them(live))
    if len(pending) < count_pending(device):
        with packed.look():
            _add(pending, seen, saved_for_backward([t for ts in pending.values() for t in ts]))
    all_found = len(pending) == count_pending(device)
    functional = filter(torch._is_functional_tensor, seen.values())
    return dict(sorted(pending.items())), {
        torch._C._storage_id(t) for t in functional if all_found or _is_whole(t)
    }


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a functional tensor is all of its storage, as it lies there. A parameter is a
    `detach` of what it is made of.
    """
    steps = _functionalization.get_view_meta_sequence(tensor)
    return all(isinstance(step, _WHOLE) for step in steps)


def _add(pending: Pending, seen: dict[int, torch.Tensor], tensors: Iterable) -> None:
    new = []
    for tensor in tensors:
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor
            new.append(tensor)
    new.sort(key=_first_id)
    ids = [_XLAC._xla_get_tensor_id(tensor) for tensor in new]  # new ones for views out of date
    for tensor, number, needed in zip(new, ids, _XLAC._check_tensor_need_materialization(new)):
        if needed:
            pending[number].append(tensor)


def _first_id(tensor: torch.Tensor) -> int:
    """A tensor's id as traced. The collector's order is not that of another run: it goes by
    addresses.
    """
    functional = torch._is_functional_tensor(tensor)
    return _XLAC._xla_get_tensor_id(torch._from_functional_tensor(tensor) if functional else tensor)


def _with_held_by_them(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, and what C++ may be the only holder of: a view's base, a gradient."""
    for tensor in tensors:
        yield tensor
        if tensor._base is not None:
            yield tensor._base
        if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
            yield tensor.grad


def set_data(pending: Pending, whole_storages: set[int], results: list[torch.Tensor]) -> None:
    """Gives each pending tensor its result, shared, not copied. Views stay views, aliases aliases,
    versions unchanged.

    Args:
        pending, whole_storages: from `find_pending`.
        results: a value for each entry of `pending`, in its order.

    A tensor and its views share one functional storage, from which torch brings each of them up to
    date when another was written. So a whole tensor is written into the storage, and its views,
    regenerated from there, get their own results in place of the slices they would be. What was
    made under a dispatch mode written in Python (a counter of operations, say) has no such storage,
    and may be the inside of one that has.
    """
    views = []
    for found, result in zip(pending.values(), results):
        inner = torch._from_functional_tensor(result)
        for bare in found:
            if not torch._is_functional_tensor(bare):
                bare.data = inner
        tensors = [t for t in found if torch._is_functional_tensor(t)]
        whole = [t for t in tensors if _is_whole(t)]
        if whole:
            torch._functionalize_replace(whole[0], inner)
            torch._functionalize_commit_update(whole[0])
            for tensor in whole:
                torch._functionalize_sync(tensor)
        views += [(t, inner, result) for t in tensors if not _is_whole(t)]
    for view, inner, result in views:
        if torch._C._storage_id(view) in whole_storages:
            torch._functionalize_sync(view)
            torch._functionalize_replace(view, inner)
        else:
            # The tensor that this is a part of is out of reach and has no value after this: the
            # view becomes a whole. (Two such views that overlap no longer share what is written
            # later.)
            view.data = result


def drop_rest(device: str) -> None:
    """Forgets the graphs that are still pending: earlier values that nobody can reach, kept by C++.

    Should somebody reach one after all, torch-xla refuses to read it, as it has no data. What is a
    mere copy of data (a `clone()`) gets it: torch-xla's own end of a step would compile a graph for
    that.
    """
    _XLAC._clear_pending_irs(device)
