"""Which addresses a server may send a reader to: its own host, and the public internet.

The host that a person names may lie anywhere. What a server answers (a redirect, the next page of a
listing) must not reach what only this machine can: services on it, its network, a cloud's metadata. The
addresses of a name are judged where they are looked up for a connection, not in a look-up of their own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator

import yarl
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.helpers import get_env_proxy_for_url

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 6052, 2.1; RFC 4291, 2.5.5.1 (IPv4-compatible) and 2.5.7 (only 2000::/3 is given out).
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
# Of the IANA registries of special addresses, what Python's `is_global` does not know in every version.
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
_ISATAP = (0x00005EFE, 0x02005EFE)  # RFC 5214, 6.1
_NUMERIC = socket.AI_NUMERICHOST


class PrivateAddressError(OSError):
    """A server leads to an address that is not public."""


def is_public(text: str) -> bool:
    """Say whether the address is one of the public internet, and embeds no other that is not."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    inner = list(_embedded(address))
    if address in _NAT64 or address.ipv4_mapped is not None:
        return all(is_public(str(each)) for each in inner)
    return address in _GIVEN_OUT and address.is_global and all(is_public(str(each)) for each in inner)


def _embedded(address: ipaddress.IPv6Address) -> Iterator[Address]:
    """Give the IPv4 addresses that a gateway would take out of the address."""
    number = int(address)
    last = ipaddress.IPv4Address(number & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif address in _NAT64 or address in _COMPATIBLE or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        yield last


def same_host(one: yarl.URL, other: yarl.URL) -> bool:
    """Say whether both URLs name one host, by the same name or the same address."""
    return _host(one) == _host(other)


def leads_away(here: yarl.URL, location: str) -> bool:
    """Say whether a link or redirect leads to another origin (scheme, host and port), or nowhere."""
    try:
        return here.join(yarl.URL(location)).origin() != here.origin()
    except ValueError:
        return True


def _host(url: yarl.URL) -> str:
    name = (url.host or "").rstrip(".").lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def require_public_name(url: yarl.URL) -> None:
    """Raise PrivateAddressError if the host itself, without any look-up, is no public one.

    All that can be judged where a proxy makes the connection. Numbers are read as the C library reads them:
    `127.1`, `0x7f000001` and `2130706433` are one address.
    """
    host = _host(url)
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        raise PrivateAddressError(host)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=_NUMERIC)
    except (OSError, UnicodeError):
        return  # a name
    if not all(is_public(str(each[4][0])) for each in found):
        raise PrivateAddressError(host)


def proxy(url: yarl.URL) -> yarl.URL | None:
    """Return the proxy that the environment names for the URL, with its user and password; else None."""
    try:
        found, auth = get_env_proxy_for_url(url)
    except LookupError:
        return None
    return found if auth is None else found.with_user(auth.login).with_password(auth.password)


class Resolver(AbstractResolver):
    """Looks up the addresses that connections are made to.

    A host that has a public address has no other for us, from then on: whoever answers for the name could
    otherwise send the next connection to a private one (DNS rebinding).
    """

    def __init__(self, *, public: bool) -> None:
        """Let connections go to public addresses alone if `public`; else to what a person's host is."""
        self._public = public
        self._seen_public: set[str] = set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses that may be connected to; raise PrivateAddressError if there are none."""
        found = await _looked_up(host, port, family)
        name = host.rstrip(".").lower()
        public = [each for each in found if is_public(each["host"])]
        if public:
            self._seen_public.add(name)
            return public
        if self._public or name in self._seen_public:
            raise PrivateAddressError(host)
        return found

    async def close(self) -> None:
        """Hold nothing."""


async def _looked_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
    )
    return [
        ResolveResult(
            hostname=host,
            host=_numeric(address),
            port=port,
            family=kind,
            proto=proto,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, proto, _, address in found
        if kind in (socket.AF_INET, socket.AF_INET6) and isinstance(address[0], str)
    ]


def _numeric(address: tuple[object, ...]) -> str:
    """Return a looked up address as text, an IPv6 one with its zone."""
    text = str(address[0])
    return f"{text}%{address[3]}" if len(address) == 4 and address[3] and "%" not in text else text
