"""A pool of rank processes that stays up for the whole test session, as starting them costs seconds
and a test milliseconds.

A test hands a module-level function to `RankPool.run`; every rank calls it and its results come
back in rank order.
"""

import atexit
import multiprocessing
import os
import pickle
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir

from torch.distributed import TCPStore

from tutorial_lib.backends import init_distributed, rank_environment

GRACE = 3.0  # seconds that ranks get to end after one of them has failed
START = 240.0  # seconds that they get to import torch and meet, on a machine that is busy
# Imported once, by the process that the ranks are forked from. Nothing of torch-xla or jax, which
# start threads.
PRELOAD = [
    *("torch", "h5py", "pytest", "torch._dynamo", "transformers.modeling_utils"),
    "tutorial_lib.parallel_layers.parallel_state",
    *(f"transformers.models.{n}.modeling_{n}" for n in ("bert", "gpt_neox", "llama", "gpt2")),
]


class RankPool:
    """`world_size` processes of one backend. They are started at the first run, and anew after a
    run that broke them.
    """

    def __init__(self, world_size: int, backend: str = "cpu"):
        self.world_size, self.backend = world_size, backend
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []
        atexit.register(self.stop)

    def run(
        self,
        function,
        *args,
        tp: int | None = 1,
        timeout: float = 60,
        return_exceptions: bool = False,
        **kwargs,
    ):
        """Calls `function(*args, **kwargs)` on every rank.

        Args:
            tp: tensor-parallel size of the mesh that is set up before the call; None leaves that to
                the function.
            timeout: seconds after which the ranks are ended and TimeoutError is raised.
            return_exceptions: give the exception of a rank as its result. Otherwise the first one
                is raised.
        """
        if not self._workers:
            self._start()
        task = pickle.dumps((function, args, kwargs, tp))
        for _, connection in self._workers:
            connection.send_bytes(task)
        results: dict[int, object] = {}
        failed = None
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                self.stop()
                for rank in waiting.values():
                    late = f"rank {rank} of {self.world_size} did not finish {function} in time"
                    results[rank] = TimeoutError(late)
                if failed is None:
                    raise TimeoutError(f"ranks {sorted(waiting.values())}: {late}, {timeout} s")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    results[rank] = RuntimeError(f"rank {rank} ended without an answer")
                if isinstance(results[rank], Exception) and failed is None:
                    failed = rank
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failed is not None:
            if len({(type(result), str(result)) for result in results.values()}) > 1:
                # The ranks took different ways: who knows what one of them still waits for.
                self.stop()
            if not return_exceptions:
                raise results[failed]
        return [results[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        get_temp_dir()  # from here on the ranks use this one, which this process removes
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            environment = rank_environment(self.backend, rank, self.world_size, master_port=0)
            # Not daemonic, as a task may start data-loader workers; `stop` runs at exit before they
            # would be joined.
            arguments = theirs, self.backend, self._store.port, environment
            process = context.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, mine))
        deadline = time.monotonic() + START
        for rank, (_, connection) in enumerate(self._workers):
            try:
                if not connection.poll(max(deadline - time.monotonic(), 0)):
                    late = f"rank {rank} of {self.world_size} did not start in {START} s"
                    raise TimeoutError(late)
                connection.recv_bytes()  # that it is ready
            except (TimeoutError, EOFError):
                self.stop()
                raise

    def stop(self) -> None:
        """Ends the processes."""
        # Rank 0 last: it serves the others' connection on XLA, and they abort, with a page of text,
        # when that is gone.
        for process, connection in reversed(self._workers):
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(connection: Connection, backend: str, port: int, environment: dict[str, str]) -> None:
    """Runs what arrives on `connection`, in a world that stays up from one task to the next."""
    os.environ.update(environment)  # before torch-xla is imported
    # Loader workers start as in any process: not from a forkserver.
    multiprocessing.set_start_method(None, force=True)
    import torch

    from tutorial_lib.parallel_layers import parallel_state

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    init_distributed(backend, 30, store)
    connection.send_bytes(b"ready")
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        try:
            function, args, kwargs, tp = pickle.loads(task)
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            parallel_state.destroy_model_parallel()
            if tp is not None:
                parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            answer = pickle.dumps(function(*args, **kwargs))
        except Exception as error:
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            answer = pickle.dumps(error)
        connection.send_bytes(answer)
