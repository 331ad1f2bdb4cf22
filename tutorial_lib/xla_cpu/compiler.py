"""Compiles graphs, each once: for all ranks that run it, and for every later run of the same
program.

A compiled graph is a file, named by all that its machine code depends on. The first rank that finds
none compiles, the others that need the same one wait for its file.
"""

import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxlib
import numpy as np
import torch_xla
from filelock import FileLock, Timeout
from jaxlib import _jax, xla_client

from tutorial_lib.storage import hash_of, write_file

CACHE_VARIABLE = "TUTORIAL_XLA_CACHE"
_DIGEST = 32  # bytes of a hash, which stands before the graph
_POLL = 0.02  # seconds between looks at whether another rank has finished
_HEARTBEAT = 20.0  # seconds between messages of a rank that waits for another's compilation
# XLA's newer emitters of fused kernels go through MLIR: a training step of BERT took 4.0 s of one
# core to compile with them and 2.6 s without, and ran no faster. LLVM's own effort stays: at level
# 0 a step took twice as long.
_OVERRIDES = [("xla_cpu_use_fusion_emitters", False)]


class Compiler:
    """Gives executables for one process's client.

    Args:
        client: of jaxlib, connected with the other processes.
        rank: of this process, for messages.
        world_size: number of processes; a graph is one replica of a program of so many.
        folder: of the compiled graphs, the same for all processes.

    Attributes:
        compilations: graphs compiled by this process.
    """

    def __init__(self, client, rank: int, world_size: int, folder: Path):
        self.compilations = 0
        self._client, self._rank, self._folder = client, rank, folder
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
            self._wait_for(lock)
        except (OSError, NotImplementedError) as error:
            message = f"no rank can wait for another's compilation, so each compiles: {error}"
            warnings.warn(message, stacklevel=2)
        try:
            yield
        finally:
            lock.release()

    def _wait_for(self, lock: FileLock) -> None:
        began = time.monotonic()
        while not lock.is_locked:
            try:
                lock.acquire(timeout=_HEARTBEAT, poll_interval=_POLL)
            except Timeout:
                waited = f"{time.monotonic() - began:.0f} s"
                print(
                    f"rank {self._rank}: another rank compiles this graph, for {waited} now",
                    flush=True,
                )

    def _load(self, entry: Path):
        if not entry.exists():
            return None
        try:
            content = entry.read_bytes()
            if hash_of(content[_DIGEST:]).encode() != content[:_DIGEST]:
                raise ValueError(f"its {len(content)} bytes are not those that were written")
            executable = self._client.deserialize_executable(
                content[_DIGEST:], self._devices, self._options
            )
        except (OSError, ValueError, _jax.XlaRuntimeError) as error:
            warnings.warn(
                f"compiled graph {entry} is of no use and is compiled anew: {error}", stacklevel=2
            )
            return None
        return executable

    def _save(self, entry: Path, executable) -> None:
        content = self._client.serialize_executable(executable)
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_file(entry, lambda file: file.write(hash_of(content).encode() + content))
        except OSError as error:
            warnings.warn(
                f"compiled graph {entry} cannot be kept for others: {error}", stacklevel=2
            )


def _processor() -> str:
    """What the machine code of a compiled graph may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
    )
