"""One step over all processes, and torch-xla's own step boundary replaced by it."""

import jax  # noqa: F401  before the threads of MpDeviceLoader, which would race to import it
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from . import saved, tensors
from .client import Client
from .reading import Guard

_XLAC = torch_xla._XLAC


class StepBoundary:
    """This process's place among the processes that run their graphs together."""

    def __init__(self, rank: int, world_size: int, timeout: float):
        # Before the first backward() of the process, or autograd has no queue for the device.
        device = torch_xla.device()
        self._fence = saved.AutogradFence(device)
        self.client = Client(rank, world_size, timeout)
        self._guard = Guard()
        self._live = tensors.LiveTensors()
        self._packed = saved.PackedTensors()
        self._own_step_marker = _XLAC._xla_step_marker
        self._own_world = xr._WORLD_SIZE, xr._ORDINAL
        self._own_reduce_scatter, xm.reduce_scatter = xm.reduce_scatter, self._reduce_scatter
        _XLAC._xla_step_marker = self._step_marker
        xr._WORLD_SIZE, xr._ORDINAL = world_size, rank

    def close(self) -> None:
        if self._guard.is_closed():
            # Nobody will run these collectives now, and torch-xla would run them alone.
            tensors.drop_rest(str(torch_xla.device()))
        _XLAC._xla_step_marker = self._own_step_marker
        xr._WORLD_SIZE, xr._ORDINAL = self._own_world
        xm.reduce_scatter = self._own_reduce_scatter
        self._packed.remove()
        self._live.close()
        self._guard.remove()
        self.client.close()

    def _step_marker(
        self, device: str, devices: list[str], wait: bool = True, reset_scope: bool = True
    ) -> None:
        """In place of torch-xla's, which all of its ways to end a step come down to."""
        self.run_pending(device)
        # Nothing is left to run. This ends the step for torch-xla: the next random seed, a new
        # chain of collectives.
        self._own_step_marker(device, devices, wait=wait, reset_scope=reset_scope)

    def _reduce_scatter(self, reduce_type, input, *args, **kwargs):
        """torch-xla's, one tensor of a list at a time: jaxlib cannot compile several together."""
        if isinstance(input, torch.Tensor):
            return self._own_reduce_scatter(reduce_type, input, *args, **kwargs)
        outputs = kwargs.pop("output", None) or [None] * len(input)
        return [
            self._own_reduce_scatter(reduce_type, one, *args, output=output, **kwargs)
            for one, output in zip(input, outputs, strict=True)
        ]

    @torch.no_grad()
    def run_pending(self, device: str) -> None:
        """Runs the pending tensors of the device with the other ranks'."""
        self._fence.wait()
        pending, whole_storages = tensors.find_pending(self._live, self._packed, device)
        # The next collective does not wait for these, not even if they fail.
        _XLAC._set_all_reduce_token(device, None)
        try:
            if pending:
                results = self.client.run([aliases[0] for aliases in pending.values()])
                tensors.set_data(pending, whole_storages, results)
            tensors.drop_rest(device)
        except KeyboardInterrupt:
            # It would run what the others have behind them, and each of its collectives would meet
            # another one.
            self.client.broken = "its step was interrupted"
            raise
        self._guard.open()
