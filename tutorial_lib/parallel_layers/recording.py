"""What the ranks send each other: a list of the collectives, and the bytes that the operating
system counted.
"""

import math
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch


class Collective(NamedTuple):
    """One collective that this rank took part in."""

    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast
    group_size: int
    shape: tuple[int, ...]  # of the input on this rank
    dtype: torch.dtype
    axis: str  # of the mesh that the group lies on: tp, dp, …

    @property
    def nbytes(self) -> int:
        """Bytes of the input on this rank."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_sent(self) -> float:
        """Bytes that a rank sends in the bandwidth-optimal (ring) algorithm (Thakur et al., 2005),
        the mean over the ranks.
        """
        n = self.group_size
        share = (n - 1) / n
        factor = {
            "all_reduce": 2 * share,
            "reduce_scatter": share,
            "all_gather": n - 1,
            "broadcast": share,
        }
        return factor[self.kind] * self.nbytes


_records: list[list[Collective]] = []


@contextmanager
def record() -> Iterator[list[Collective]]:
    """Lists every collective that runs (or, on XLA, is traced) inside the block, in order."""
    log: list[Collective] = []
    _records.append(log)
    try:
        yield log
    finally:
        _records.pop()  # of two equal lists `remove` would take the outer one


def note(kind: str, axis, tensor: torch.Tensor) -> None:
    """Adds a collective over an axis of `parallel_state` to every list that is being made."""
    for log in _records:
        log.append(Collective(kind, axis.size, tuple(tensor.shape), tensor.dtype, axis.name))


def count(log: list[Collective]) -> Counter:
    """How often each `(kind, group size)` occurs in a log of `record`."""
    return Counter((c.kind, c.group_size) for c in log)


# struct tcp_info of linux/tcp.h, since Linux 4.19: tcpi_notsent_bytes; tcpi_bytes_sent and
# tcpi_bytes_retrans.
_NOT_SENT, _BYTES_SENT, _SIZE = 144, 200, 216


def bytes_sent() -> int | None:
    """Bytes that this process has handed to its open TCP connections so far, without
    retransmissions.

    The difference between two calls is what a collective sent, if it went over TCP: gloo's and
    those of XLA on CPU do, NCCL and NeuronLink do not. It includes the few hundred bytes with which
    gloo frames its messages, and a notebook engine its replies.

    Returns:
        None where the system has no such counter (anything but Linux).
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr:  # it listens
            continue
        with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        if len(info) < _SIZE:
            return None
        sent, again = struct.unpack_from("<QQ", info, _BYTES_SENT)
        (waiting,) = struct.unpack_from("<I", info, _NOT_SENT)
        total += sent - again + waiting
    return total
