"""Which of a machine's addresses others reach it at. Imports no torch."""

import socket

import psutil


def address_towards(host: str) -> str:
    """The address of this machine on the network on which it reaches `host`, a name or an
    address.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # chooses a route; nothing is sent
        return probe.getsockname()[0]


def interface_towards(host: str) -> str:
    """The name of the network interface that has that address."""
    address = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        # A scope may stand behind the %.
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    raise RuntimeError(
        f"no network interface has the address {address}, from which {host} is reached"
    )
