"""Which addresses a webhook may be sent to.  A name is resolved once per attempt and the connection goes to
an address that was checked here, so an answer that changes in between changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) → addresses as text; raises OSError when there is none."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressRefused(Exception):
    """A host of the allow-list points to where its entry does not let it."""


async def resolve(host: str, port: int) -> list[str]:
    """The system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def checked(addresses: list[str], *, private: bool) -> list[str]:
    """The addresses, when a webhook may go to every one of them; raises AddressRefused."""
    if not addresses:
        raise AddressRefused("the host has no address")
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise AddressRefused(f"{text!r} is no address without a zone") from None
        if not _may_be_called(address, private=private):
            raise AddressRefused(f"the host's address {text} is not one a webhook may be sent to")
    return addresses


def _may_be_called(address: Address, *, private: bool) -> bool:
    """Public addresses; with `private` those of private networks and of this machine too.

    Never link-local ones, where clouds serve their credentials, and never groups or reserved blocks.
    """
    if isinstance(address, ipaddress.IPv6Address) and (inner := _embedded(address)) is not None:
        return _may_be_called(inner, private=private)
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if address.is_loopback:
        return private
    return not address.is_reserved and (address.is_global or private)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address stands for."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour
