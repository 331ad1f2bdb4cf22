"""Compiles graphs, each once: for all ranks that run it, and for every later run of the same
program.

A compiled graph is a file, named by all that its machine code depends on. The first rank that finds
none compiles; others that need the same graph wait for its file.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxlib
import numpy as np
import torch_xla
from filelock import FileLock
from jaxlib import _jax, xla_client

from tutorial_lib.storage import hash_of, write_file

CACHE_VARIABLE = "TUTORIAL_XLA_CACHE"
_DIGEST = 32  # bytes of a hash, which stands before the graph
_POLL = 0.02  # seconds between looks at whether another rank has finished
# XLA's newer emitters of fused kernels go through MLIR: a training step of BERT took 4.0 s of one
# core to compile with them and 2.6 s without, and ran no faster. LLVM's own effort stays: at level
# 0 a step took twice as long.
_OVERRIDES = [("xla_cpu_use_fusion_emitters", False)]


class Compiler:
    """Gives executables for one process's client.

    Args:
        client: of jaxlib, connected with the other processes.
        world_size: number of processes; a graph is one replica of a program of so many.
        folder: of the compiled graphs, the same for all processes.

    Attributes:
        compilations: graphs compiled by this process.
    """

    def __init__(self, client, world_size: int, folder: Path):
        self.compilations = 0
        self._client, self._folder = client, folder
        self._devices = xla_client.DeviceList((client.local_devices()[0],))
        self._options = xla_client.CompileOptions()
        self._options.num_replicas, self._options.num_partitions = world_size, 1
        order = sorted(client.devices(), key=lambda device: device.process_index)
        self._options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[device.id] for device in order])
        )
        self._options.env_option_overrides = _OVERRIDES
        identity = [torch_xla.__version__, jaxlib.__version__, str(world_size), _processor()]
        identity += [str(_OVERRIDES), os.environ.get("XLA_FLAGS", "")]
        self._identity = "\0".join(identity).encode()

    def get_executable(self, hlo: bytes, computation):
        """The executable of a graph, given as HLO proto and as the computation made of it."""
        entry = self._folder / hash_of(self._identity + hlo)
        if (executable := self._load(entry)) is not None:
            return executable
        with self._alone(entry):
            if (executable := self._load(entry)) is not None:  # another rank has made it meanwhile
                return executable
            module = _jax.mlir.xla_computation_to_mlir_module(computation)
            executable = self._client.compile_and_load(module, self._devices, self._options)
            self.compilations += 1
            self._save(entry, executable)
        return executable

    @contextmanager
    def _alone(self, entry: Path) -> Iterator[None]:
        """Lets one process at a time make `entry`. The lock of a process that dies is free at once.

        256 locks serve all graphs, so that nobody has to remove one: two graphs that share a lock
        are compiled one after the other.
        """
        lock = FileLock(entry.parent / f"{entry.name[:2]}.lock")
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(poll_interval=_POLL)
        except (OSError, NotImplementedError) as error:
            message = f"no rank can wait for another's compilation, so each compiles: {error}"
            warnings.warn(message, stacklevel=2)
        try:
            yield
        finally:
            lock.release()

    def _load(self, entry: Path):
        if not entry.exists():
            return None
        try:
            content = entry.read_bytes()
            if hash_of(content[_DIGEST:]).encode() != content[:_DIGEST]:
                raise ValueError(f"its {len(content)} bytes are not those that were written")
            return self._client.deserialize_executable(
                content[_DIGEST:], self._devices, self._options
            )
        except (OSError, ValueError, _jax.XlaRuntimeError) as error:
            message = f"compiled graph {entry} cannot be used and is compiled again: {error}"
            warnings.warn(message, stacklevel=2)
            return None

    def _save(self, entry: Path, executable) -> None:
        content = self._client.serialize_executable(executable)
        try:
            write_file(entry, lambda file: file.write(hash_of(content).encode() + content))
        except OSError as error:
            message = f"compiled graph {entry} cannot be kept for others: {error}"
            warnings.warn(message, stacklevel=2)


def _processor() -> str:
    """What the machine code of a compiled graph may use; torch-xla runs on Linux alone."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
