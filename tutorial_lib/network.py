"""Which of a machine's addresses others reach it at. Imports no torch: an engine asks before its environment is set."""

import socket

import psutil


def address_towards(host: str) -> str:
    """The address of this machine on the network on which it reaches `host` (a name or an IPv4 address)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # chooses a route; nothing is sent
        return probe.getsockname()[0]


def interface_towards(host: str) -> str:
    """The name of the network interface that has that address.

    Raises:
        RuntimeError: none has it.
    """
    address = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    raise RuntimeError(f"no network interface has the address {address}, from which {host} is reached")
