"""Limits the connections of each network address, and closes those that send no request."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter
from typing import Any

CONNECTIONS = 120  # of one address; a browser opens six
SILENCE = 20  # seconds in which a connection must have sent a whole request


def limited_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    _raise_file_limit()
    connected: Counter[str] = Counter()

    class Limited(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._address = network_of(str((transport.get_extra_info("peername") or [""])[0]))
            connected[self._address] += 1
            self._timer = self.loop.call_later(SILENCE, self._close_if_silent, None)
            if connected[self._address] > CONNECTIONS:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            connected[self._address] -= 1
            if not connected[self._address]:
                del connected[self._address]
            super().connection_lost(exc)

        def _close_if_silent(self, last: object) -> None:
            """`last` is the last request at the previous call."""
            if self.cycle is last and (self.cycle is None or self.cycle.response_complete):
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(SILENCE, self._close_if_silent, self.cycle)

    return Limited


def network_of(address: str) -> str:
    """The address that limits count. A machine usually has a whole IPv6 network of 64 bits for itself."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), 64), strict=False))


def _raise_file_limit() -> None:
    """Raises the number of files that this process can open. The usual 1,024 are soon used up."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if most != resource.RLIM_INFINITY else 65536, most))
