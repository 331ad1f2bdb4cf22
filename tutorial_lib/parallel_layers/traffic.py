"""The bytes that really left this process, as its operating system counted them."""

import os
import socket
import struct
import sys

import psutil

# struct tcp_info of linux/tcp.h, since Linux 4.19: tcpi_notsent_bytes; tcpi_bytes_sent and tcpi_bytes_retrans.
_NOT_SENT, _BYTES_SENT, _SIZE = 144, 200, 216


def bytes_sent() -> int | None:
    """Bytes that this process has handed to its open TCP connections so far, without retransmissions.

    The difference between two calls is what a collective sent, if it went over TCP: gloo's and those of XLA on CPU do,
    NCCL and NeuronLink do not. The few hundred bytes with which gloo frames its messages, and a notebook engine its
    replies, are in it.

    Returns:
        None where the system keeps no such counter (anything but Linux).
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
