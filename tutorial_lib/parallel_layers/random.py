"""Random streams: where ranks must draw the same numbers, and where they must not.

A replicated activation needs the same dropout mask on all tensor-parallel ranks, or it stops being
replicated: it uses torch's default stream. A sharded one (attention heads, a part of the sequence)
needs a mask of its own on each rank: it is drawn inside `with get_xla_rng_tracker().fork():`. Names
are those of `neuronx_distributed.parallel_layers.random`.

A state is a dict of plain tensors, one for each kind of device that this process uses, so it can be
saved with any checkpoint and loaded with `weights_only=True`. Nothing here waits for a device.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.utils.checkpoint

from tutorial_lib import backends

from . import parallel_state

MODEL_PARALLEL_RNG = "model-parallel-rng"
# Between the default stream's seed and those of the tensor-parallel ranks.
_TENSOR_PARALLEL_OFFSET = 2718
# Between replicas: a prime above any number of tensor-parallel ranks.
_DATA_PARALLEL_OFFSET = 1_000_003

State = dict[str, torch.Tensor]


def _xla():
    """torch-xla's model module in a process that computes with it, else None."""
    if not backends.uses_xla():
        return None
    import torch_xla.core.xla_model as xm

    return xm


def _default_state() -> State:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if _xla():
        seed = _xla().get_rng_state()  # 64 bits without a sign
        seed = seed - 2**64 if seed >= 2**63 else seed
        state["xla"] = torch.tensor(seed, dtype=torch.int64, device="cpu")
    return state


def _set_default_state(state: State) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "xla" in state and _xla():
        _xla().set_rng_state(state["xla"].item() % 2**64)


def _seed_default(seed: int) -> None:
    torch.manual_seed(seed)  # the host and every CUDA device
    if _xla():
        _xla().set_rng_state(seed)


class XLARNGStatesTracker:
    """Named random streams beside torch's default one."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets every stream."""
        self._states: dict[str, State] = {}
        self._seeds: dict[str, int] = {}
        self._active: str | None = None  # the stream that the innermost `fork` draws from

    def get_states(self) -> dict[str, State]:
        """The state of each stream: `{name: {device: tensor}}`."""
        return {name: dict(state) for name, state in self._states.items()}

    def set_states(self, states: dict[str, State]) -> None:
        """Puts streams back where `get_states` found them."""
        self._states = {name: dict(state) for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Starts the stream `name`.

        Raises:
            ValueError: a stream of that name, or started from that seed, exists.
        """
        if name in self._states:
            raise ValueError(f"the random stream {name!r} exists already")
        if seed in self._seeds.values():
            raise ValueError(f"seed {seed} was used for another random stream: {self._seeds}")
        before = _default_state()
        _seed_default(seed)
        self._states[name], self._seeds[name] = _default_state(), seed
        _set_default_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Inside the block, random numbers come from the stream `name`; the default stream stands
        still. Blocks may lie in each other, of the same stream too, which then just goes on.

        Raises:
            ValueError: there is no such stream.
        """
        if name not in self._states:
            raise ValueError(
                f"there is no random stream {name!r} (only {sorted(self._states)}): "
                "call model_parallel_xla_manual_seed first"
            )
        outer, before = self._active, _default_state()
        if outer is not None:
            self._states[outer] = before
        self._active = name
        _set_default_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _default_state()
            self._active = outer
            _set_default_state(before if outer is None else self._states[outer])


_tracker = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def _replica() -> int:
    """The number of this rank among those that hold the same weights, over data and context parallelism."""
    cp = parallel_state.get_context_model_parallel_size()
    return (
        parallel_state.get_data_parallel_rank() * cp
        + parallel_state.get_context_model_parallel_rank()
    )


def model_parallel_xla_manual_seed(seed: int, data_parallel_offset: bool = False) -> None:
    """Seeds the default stream and starts the model-parallel one, on the host and on the device.

    ============================  ==================  ==================
    stream                        over a tensor-      over a data-
                                  parallel group      parallel group
    ============================  ==================  ==================
    default                       equal               equal; different with `data_parallel_offset`
    `model-parallel-rng`          different           different
    ============================  ==================  ==================

    Call it before the model is built: replicas then start from the same weights. For training they
    should drop different units: `separate_replicas`, or a second call with
    `data_parallel_offset=True`.

    Args:
        seed: the same on every rank.
        data_parallel_offset: give each replica a default stream of its own.
    """
    own = seed + _DATA_PARALLEL_OFFSET * _replica()
    _seed_default(own if data_parallel_offset else seed)
    _tracker.reset()
    _tracker.add(
        MODEL_PARALLEL_RNG,
        own + _TENSOR_PARALLEL_OFFSET + parallel_state.get_tensor_model_parallel_rank(),
    )


def separate_replicas() -> None:
    """Gives each data-parallel replica a default stream of its own, so that it drops other units
    than the next; where there is one replica, nothing.

    The seed is drawn from the stream as it stands, which the ranks of a tensor-parallel group
    share, and they go on sharing. `train` calls it before its first step.
    """
    if len(parallel_state.get_zero1_sharding_groups()[0]) == 1:
        return
    seed = int(torch.randint(2**31, (), device="cpu"))
    if replica := _replica():
        _seed_default(seed + _DATA_PARALLEL_OFFSET * replica)


def checkpoint(function: Callable, *args, **kwargs):
    """`function(*args, **kwargs)`, computed again in backward rather than kept: its inner
    activations cost no memory.

    The second run draws the random numbers of the first, from every stream;
    `torch.utils.checkpoint` alone knows the default one, and no XLA. On XLA a barrier keeps the
    compiler from finding the first run's values and using them.
    """
    replay = _Replay()

    def run(*args):
        again = replay.running and _xla()
        return function(*(_behind_barrier(args) if again else args), **kwargs)

    # torch keeps arguments where `SavedActivations` sees them, but looks up their device, and
    # knows no XLA.
    block, inputs = (partial(run, *args), ()) if _xla() else (run, args)
    return torch.utils.checkpoint.checkpoint(
        block,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (replay.first(), replay),
    )


class _Replay:
    """Inside the block all random streams are where `first` found them. It may be entered again: backward through
    a graph that was retained computes its values once more.
    """

    def __init__(self):
        self._start = self._before = None
        self.running = False

    @contextmanager
    def first(self) -> Iterator[None]:
        self._start = _streams()
        yield

    def __enter__(self) -> None:
        self._before, self.running = _streams(), True
        _set_streams(self._start)

    def __exit__(self, *_) -> None:
        _set_streams(self._before)
        self.running = False


def _streams() -> tuple[State, dict[str, State], str | None]:
    return _default_state(), _tracker.get_states(), _tracker._active


def _set_streams(streams: tuple[State, dict[str, State], str | None]) -> None:
    default, states, _tracker._active = streams
    _set_default_state(default)
    _tracker.set_states(states)


def _behind_barrier(args: tuple) -> tuple:
    """The same values, of which XLA does not know where they come from."""
    held = tuple(
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    )
    _xla().optimization_barrier_([a for a in held if isinstance(a, torch.Tensor)])
    return held


def get_rng_state() -> dict:
    """Every random state of this process: torch's, the tracker's, numpy's and Python's, as tensors
    and plain numbers.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": _default_state(),
        "tracker": _tracker.get_states(),
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
    }


def set_rng_state(state: dict) -> None:
    """Puts every random state back where `get_rng_state` found it.

    Raises:
        KeyError: a part of the state is missing.
    """
    _set_default_state(state["torch"])
    _tracker.set_states(state["tracker"])
    numpy_state = state["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (
            numpy_state["kind"],
            keys,
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["cached"],
        )
    )
    python_state = state["python"]
    random.setstate(
        (python_state["version"], tuple(python_state["words"].tolist()), python_state["gauss"])
    )
