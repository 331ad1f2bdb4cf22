"""What autograd holds of a step: tensors that a graph has saved, and those that its thread has not
let go of yet.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks


class PackedTensors:
    """Keeps a look at what a graph has saved from running hooks: to unpack, activation
    checkpointing computes a block.

    What hooks have packed they hold in Python, where the collector sees it.
    """

    def __init__(self):
        self._looking = False
        self._init = saved_tensors_hooks.__init__
        saved_tensors_hooks.__init__ = self._guarded(self._init)

    def remove(self) -> None:
        saved_tensors_hooks.__init__ = self._init

    def _guarded(self, init):
        @functools.wraps(init)
        def guarded(hooks, pack_hook, unpack_hook):
            @functools.wraps(unpack_hook)
            def unpack(packed):
                if self._looking:
                    raise RuntimeError("what hooks have packed stays packed")
                return unpack_hook(packed)

            init(hooks, pack_hook, unpack)

        return guarded

    @contextmanager
    def look(self) -> Iterator[None]:
        """Inside, to unpack raises an error."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False


class AutogradFence:
    """Waits until autograd's thread for the device has let go of the tensors of the last
    `backward()`.

    `backward()` may return while that thread still frees tensors, without Python's lock. If the
    memory of one goes while the collector hands out its Python object, the process crashes. So a
    gradient that is passed on unchanged is enqueued and waited for: the thread runs its tasks in
    order. All tensors of this gradient stay, so it frees nothing; all came from the host, so there
    is no graph. (0-d tensors would become constants of the first step's graph.)
    """

    def __init__(self, device: torch.device):
        self._leaf, self._one = torch.zeros(1).to(device).requires_grad_(), torch.ones(1).to(device)
        with torch.enable_grad():
            self._result = _PassOn.apply(self._leaf)

    def wait(self) -> None:
        torch.autograd.grad(self._result, self._leaf, self._one, retain_graph=True)


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1).to(leaf.device)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def saved_for_backward(roots: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What the autograd graphs of `roots` keep, for a step that ends before backward."""
    todo = [t.grad_fn for t in roots if t.grad_fn is not None]
    visited = set(todo)
    while todo:
        node = todo.pop()
        for name in dir(node):
            if name == "saved_tensors" or (
                name.startswith("_saved_") and not name.startswith("_saved_self_sym")
            ):
                try:
                    value = getattr(node, name)
                except RuntimeError:  # backward has run and freed it, or it is packed
                    continue
                for item in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(item, torch.Tensor) and item.device.type == "xla":
                        yield item
        for successor, _ in node.next_functions:
            if successor is not None and successor not in visited:
                visited.add(successor)
                todo.append(successor)
