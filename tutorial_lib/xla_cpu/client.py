"""jaxlib's CPU client over several processes: connection, graphs, execution with a time-out."""

import ctypes
import os
import socket
import sys
import warnings
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch_xla
from jaxlib import _jax, xla_client

from tutorial_lib.lab.paths import resolve
from tutorial_lib.network import address_towards

from .compiler import CACHE_VARIABLE, Compiler

_XLAC = torch_xla._XLAC


class Graph(NamedTuple):
    """A compiled graph."""

    computation: object  # as torch-xla traced it, before XLA's own passes
    executable: object


class Client:
    """The connection of this process with its peers.

    Args:
        rank, world_size: of the default process group, over which the processes agree on a port.
        timeout: seconds that a step may take, from the moment this rank reaches it.

    Attributes:
        broken: why this rank may be in another step than its peers, so that it runs nothing any
            more; else None.
    """

    def __init__(self, rank: int, world_size: int, timeout: float):
        self.graphs: dict[str, Graph] = {}
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self.broken: str | None = None
        self._connect()
        self._device = self._client.local_devices()[0]
        folder = Path(os.environ.get(CACHE_VARIABLE) or resolve("build/xla_cache"))
        self.compiler = Compiler(self._client, world_size, folder)

    def _connect(self) -> None:
        """Rank 0 serves what the others need to find each other; the collectives then go from
        process to process.
        """
        host = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        address = [f"{host}:{_free_port()}" if self._rank == 0 else None]
        dist.broadcast_object_list(address)
        seconds = max(int(self._timeout), 1)
        self._service = None
        if self._rank == 0:
            self._service = _jax.get_distributed_runtime_service(
                address[0], self._world_size,
                cluster_register_timeout=seconds, shutdown_timeout=seconds,
            )  # fmt: skip
        # Recoverable: the service does not end the other processes if one of them is lost. They
        # find out by themselves, with an exception rather than an abort. Only the loss of rank 0
        # ends all.
        self._store = _jax.get_distributed_runtime_client(
            address[0], self._rank, shutdown_on_destruction=False, recoverable=True,
            rpc_timeout=seconds, init_timeout=seconds, shutdown_timeout=seconds,
        )  # fmt: skip
        self._store.connect()
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        collectives = _jax.make_gloo_tcp_collectives(
            self._store, hostname=None if interface else host, interface=interface
        )
        self._client = xla_client.make_cpu_client(
            distributed_client=self._store, node_id=self._rank, num_nodes=self._world_size,
            collectives=collectives,
        )  # fmt: skip

    def close(self) -> None:
        """Disconnects. Rank 0 waits until all have, as the others abort when its service ends
        before that.
        """
        if self.broken or getattr(sys, "last_value", None) is not None:
            # The others may come later or never. So what they need of rank 0 stays until its
            # process ends.
            _keep(self._service)
        else:
            try:
                self._store.key_value_set(f"closed/{self._rank}", "")
                for rank in range(self._world_size if self._rank == 0 else 0):
                    wait = int(self._timeout * 1000)
                    self._store.blocking_key_value_get(f"closed/{rank}", wait)
            except _jax.XlaRuntimeError as error:
                warnings.warn(f"not every rank has disconnected: {error}", stacklevel=2)
        self._store.shutdown()
        self.graphs.clear()

    def _graph(self, tensors: list[torch.Tensor]) -> Graph:
        key = _XLAC._get_graph_hash(tensors)
        if key not in self.graphs:
            hlo = _XLAC._get_xla_tensors_hlo_proto(tensors)
            computation = xla_client.XlaComputation(hlo)
            self.graphs[key] = Graph(computation, self.compiler.get_executable(hlo, computation))
        return self.graphs[key]

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values of the pending `tensors`, as XLA tensors.

        Raises:
            RuntimeError: a peer ended, or did not run its graph within the time-out; every later
                call raises it too.
        """
        if self.broken:
            raise RuntimeError(
                f"an earlier error left the ranks out of step, restart them: {self.broken}"
            )
        graph = self._graph(tensors)
        _, parameters = _XLAC._get_tensors_xla_device_data_node(tensors)
        if any(map(_XLAC._is_placecholder, parameters)):  # spelled so in torch-xla
            raise RuntimeError(
                "this step needs a value that an earlier step boundary could not keep, as only C++ "
                "held it (saved for backward, for example): end the step after backward()"
            )
        _XLAC._xla_wait_device_ops([])
        arguments = [
            _jax.dlpack_managed_tensor_to_buffer(_XLAC._to_dlpack(p), self._device, None)
            for p in parameters
        ]
        try:
            outputs = self._wait_for(graph.executable, arguments)
        except (FutureTimeout, _jax.XlaRuntimeError) as error:
            late = f"not all ranks ran their step within {self._timeout:g} s; did one raise?"
            self.broken = str(error) or late
            raise RuntimeError(
                f"rank {self._rank} of {self._world_size} could not finish its step: {self.broken}"
            ) from error
        assert len(outputs) == len(tensors), f"{len(outputs)} results for {len(tensors)} tensors"
        return [_XLAC._from_dlpack(_jax.buffer_to_dlpack_managed_tensor(o)) for o in outputs]

    def _wait_for(self, executable, arguments: list) -> list:
        """Runs in a thread: XLA gives a collective no time-out, and a thread can be left to wait
        alone.
        """
        future = Future()

        def execute():
            try:
                results = executable.execute_sharded(arguments)
                arrays = results.disassemble_into_single_device_arrays()
                outputs = [of_devices[0] for of_devices in arrays]
                for output in outputs:
                    output.block_until_ready()
                future.set_result(outputs)
            except BaseException as error:
                future.set_exception(error)

        Thread(target=execute, daemon=True).start()
        try:
            return future.result(self._timeout)
        except BaseException:
            # The thread may never end. Its client must not be destroyed, which would wait for it at
            # exit.
            _keep(self._client)
            raise


def _keep(thing: object) -> None:
    """Never destroys `thing`, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
