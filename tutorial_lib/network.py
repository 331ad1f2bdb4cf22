"""Which of a machine's addresses others reach it at. Imports no torch: an engine asks before its
environment is set.
"""

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
    """The name of the network interface that has that address.

    Raises:
        RuntimeError: none has it.
    """
    address = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(
            one.address.partition("%")[0] == address for one in addresses
        ):  # a scope may stand behind the %
            return name
    raise RuntimeError(
        f"no network interface has the address {address}, from which {host} is reached"
    )


def loopback() -> str:
    """The address at which this machine reaches itself, and nobody else does.

    Raises:
        RuntimeError: the loopback interface is down.
    """
    for address in ("127.0.0.1", "::1"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with (
                socket.create_server((address, 0), family=family) as server,
                socket.create_connection(server.getsockname()[:2], timeout=5),
            ):
                return address
        except OSError:
            continue
    raise RuntimeError(
        "neither 127.0.0.1 nor ::1 can be reached: the loopback interface is down (ip link set "
        "lo up)"
    )
