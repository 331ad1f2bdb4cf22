"""Random streams: where ranks must draw the same numbers, and where they must not.

A replicated activation needs the same dropout mask on all tensor-parallel ranks, or it stops being
replicated: it uses torch's default stream. A sharded one (attention heads, a shard of the sequence)
needs a mask of its own on each rank: it is drawn inside `with get_xla_rng_tracker().fork():`. Names
are those of `neuronx_distributed.parallel_layers.random`.

A state is a dict of plain tensors, one for each kind of device that this process uses, so it can be
saved with any checkpoint and loaded with `weights_only=True`. Nothing here waits for a device.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tutorial_lib import backends

from . import parallel_state

MODEL_PARALLEL_RNG = "model-parallel-rng"
# Between the default stream's seed and those of the tensor-parallel ranks.
_TENSOR_PARALLEL_OFFSET = 2718
# Between replicas: a prime above any number of tensor-parallel ranks.
_DATA_PARALLEL_OFFSET = 1_000_003

State = dict[str, torch.Tensor]


def xla_model():
    """torch-xla's model module in a process that computes with it, else None."""
    if not backends.uses_xla():
        return None
    import torch_xla.core.xla_model as xm

    return xm


def _devices() -> dict:
    """What keeps torch's own states: the host and the device this process computes on."""
    backend = backends.current_backend()
    return {"cpu": torch} | (
        {} if backend in ("cpu", "xla") else {backend: getattr(torch, backend)}
    )


def _default_state() -> State:
    state = {name: device.get_rng_state() for name, device in _devices().items()}
    if xla_model():
        seed = xla_model().get_rng_state()  # 64 bits without a sign, which int64 has
        state["xla"] = torch.tensor(seed - (seed >> 63 << 64), dtype=torch.int64, device="cpu")
    return state


def _set_default_state(state: State) -> None:
    for name, device in _devices().items():
        if name in state:
            device.set_rng_state(state[name])
    if "xla" in state and xla_model():
        xla_model().set_rng_state(state["xla"].item() % 2**64)


def _seed_default(seed: int) -> None:
    torch.manual_seed(seed)  # the host and every device that torch knows
    if xla_model():
        xla_model().set_rng_state(seed)


class XLARNGStatesTracker:
    """The random stream of each tensor-parallel rank, beside torch's default one."""

    def __init__(self):
        self._states: dict[str, State] = {}
        self._active = False  # inside a `fork`, which draws from the stream

    def get_states(self) -> dict[str, State]:
        """The state of the stream: `{name: {device: tensor}}`; empty before it was started."""
        return {name: dict(state) for name, state in self._states.items()}

    def set_states(self, states: dict[str, State]) -> None:
        """Puts the stream back where `get_states` found it."""
        self._states = {name: dict(state) for name, state in states.items()}

    def start(self, seed: int) -> None:
        """Starts the stream from a seed."""
        before = _default_state()
        _seed_default(seed)
        self._states = {MODEL_PARALLEL_RNG: _default_state()}
        _set_default_state(before)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Inside the block, random numbers come from this rank's stream, and the default stream
        stands still. A fork within a fork goes on with the same stream.

        Raises:
            ValueError: the stream was not started.
        """
        if not self._states:
            raise ValueError(
                "the model-parallel random stream was not started: call "
                "model_parallel_xla_manual_seed first"
            )
        if self._active:
            yield
            return
        before, self._active = _default_state(), True
        _set_default_state(self._states[MODEL_PARALLEL_RNG])
        try:
            yield
        finally:
            self._states[MODEL_PARALLEL_RNG] = _default_state()
            self._active = False
            _set_default_state(before)


_tracker = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Seeds the default stream and starts the model-parallel one, on the host and on the device.

    =====================  ===============================  ===============================
    stream                 over a tensor-parallel group     over a data-parallel group
    =====================  ===============================  ===============================
    default                equal                            equal
    `model-parallel-rng`   different                        different
    =====================  ===============================  ===============================

    Call it before the model is built: replicas then start from the same weights. For training they
    should drop different units: see `separate_replicas`.

    Args:
        seed: the same on every rank.
    """
    _seed_default(seed)
    replica = _DATA_PARALLEL_OFFSET * parallel_state.get_data_parallel_rank()
    rank = _TENSOR_PARALLEL_OFFSET + parallel_state.get_tensor_model_parallel_rank()
    _tracker.start(seed + replica + rank)


def separate_replicas() -> None:
    """Gives each data-parallel replica a default stream of its own, so that each drops other units;
    does nothing if there is one replica.

    The seed is drawn from the stream as it stands, which the ranks of a tensor-parallel group
    share, and they go on sharing. `train` calls it before its first step.
    """
    if parallel_state.get_data_parallel_size() == 1:
        return
    seed = int(torch.randint(2**31, (), device="cpu"))
    if replica := parallel_state.get_data_parallel_rank():
        _seed_default(seed + _DATA_PARALLEL_OFFSET * replica)


def streams() -> tuple[State, dict[str, State], bool]:
    """Where both streams stand, and which of them is drawn from."""
    return _default_state(), _tracker.get_states(), _tracker._active


def set_streams(found: tuple[State, dict[str, State], bool]) -> None:
    default, states, _tracker._active = found
    _set_default_state(default)
    _tracker.set_states(states)


_NUMPY = ("kind", "keys", "position", "has_gauss", "cached")  # of numpy's tuple, in its order
_PYTHON = ("version", "words", "gauss")


def get_rng_state() -> dict:
    """Every random state of this process: torch's, the tracker's, numpy's and Python's, as tensors
    and plain numbers.
    """
    of_numpy = dict(zip(_NUMPY, np.random.get_state()))
    of_python = dict(zip(_PYTHON, random.getstate()))
    return {
        "torch": _default_state(),
        "tracker": _tracker.get_states(),
        "numpy": of_numpy | {"keys": torch.from_numpy(of_numpy["keys"].astype(np.int64))},
        "python": of_python
        | {"words": torch.tensor(of_python["words"], dtype=torch.int64, device="cpu")},
    }


def set_rng_state(state: dict) -> None:
    """Puts every random state back where `get_rng_state` found it.

    Raises:
        KeyError: a part of the state is missing.
    """
    _set_default_state(state["torch"])
    _tracker.set_states(state["tracker"])
    of_numpy, of_python = dict(state["numpy"]), dict(state["python"])
    of_numpy["keys"] = of_numpy["keys"].numpy().astype(np.uint32)
    of_python["words"] = tuple(of_python["words"].tolist())
    np.random.set_state(tuple(of_numpy[name] for name in _NUMPY))
    random.setstate(tuple(of_python[name] for name in _PYTHON))
