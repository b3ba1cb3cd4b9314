"""Calls to customers' webhooks: only where the operator allows it, bounded in time, size and number.

No redirect is followed, no proxy and no credentials of the environment are used, the connection goes to
an address that was checked, and an answer is read up to a bound, undecoded.  Only failures of the
infrastructure are tried again: no connection, one that broke, 5xx, 429.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import random
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx2
from rollgrid_runtime.webhooks import Allowed, Location

from .addresses import AddressRefused, Resolve, checked, resolve

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
MAX_RETRY_AFTER_S = 60.0
logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs whole URLs
CONNECTIONS = 32
"""To one origin."""


class CallFailed(Exception):
    """A call ended without an answer after `attempt` tries; `timed_out` says that time was the reason."""

    def __init__(self, message: str, *, attempt: int = 1, timed_out: bool = False) -> None:
        super().__init__(message)
        self.attempt, self.timed_out = attempt, timed_out


class _Again(Exception):
    """The infrastructure failed: worth another attempt, not before `after_s`."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Reply(NamedTuple):
    body: bytes
    attempt: int


class WebhookClient:
    """One per scorer; keeps connections open per origin of the allow-list."""

    def __init__(
        self, *, attempts: int, max_bytes: int, ca_file: Path | None = None, find_addresses: Resolve = resolve
    ) -> None:
        self._attempts, self._max_bytes = attempts, max_bytes
        self._resolve = find_addresses
        self._tls = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        self._clients: dict[str, httpx2.AsyncClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def post(
        self,
        location: Location,
        entry: Allowed,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        until: float,
    ) -> Reply:
        """The answer's body.  `timeout_s` bounds each attempt, `until` (UNIX seconds, 0 = none) all of them.

        Raises CallFailed.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                async with asyncio.timeout(timeout_s):
                    return Reply(await self._attempt(location, entry, body, headers, timeout_s), attempt)
            except TimeoutError:
                what = f"no answer within {timeout_s:g} s"
                raise CallFailed(what, attempt=attempt, timed_out=True) from None
            except CallFailed as error:
                error.attempt = attempt
                raise
            except _Again as error:
                pause_s = _pause_s(attempt, error.after_s)
                if attempt == self._attempts or (until and time.time() + pause_s > until):
                    raise CallFailed(f"{error} (attempt {attempt})", attempt=attempt) from None
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt always ends the loop")

    async def _attempt(
        self, location: Location, entry: Allowed, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        try:
            addresses = checked(await self._resolve(location.host, location.port), private=entry.private)
        except AddressRefused as error:
            raise CallFailed(str(error)) from None
        except OSError as error:
            raise _Again(f"{location.host} cannot be resolved: {error}") from None
        broken = _Again("no address")
        for address in addresses:
            try:
                return await self._exchange(location, address, body, headers, timeout_s)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                broken = _Again(f"no connection to {location.origin}: {str(error) or type(error).__name__}")
            except httpx2.TimeoutException:
                raise TimeoutError from None
            except httpx2.TransportError as error:
                raise _Again(f"the connection broke: {str(error) or type(error).__name__}") from None
        raise broken

    async def _exchange(
        self, location: Location, address: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        host = f"[{address}]" if ":" in address else address
        request = httpx2.Request(
            "POST",
            f"{location.scheme}://{host}:{location.port}{location.target}",
            content=body,
            headers={**headers, "host": location.netloc},
            # the certificate must be the name's, not the address's
            extensions={"sni_hostname": location.host, "timeout": httpx2.Timeout(timeout_s).as_dict()},
        )
        response = await self._client(location).send(request, stream=True, follow_redirects=False)
        try:
            _check_status(response)
            return await self._read(response)
        finally:
            await response.aclose()

    async def _read(self, response: httpx2.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise CallFailed("the webhook's answer is compressed, which it was asked not to be")
        found = bytearray()
        async for piece in response.aiter_raw():
            found += piece
            if len(found) > self._max_bytes:
                raise CallFailed(f"the webhook's answer is over {self._max_bytes} bytes")
        return bytes(found)

    def _client(self, location: Location) -> httpx2.AsyncClient:
        """One pool per origin: a connection made for one name must never serve another at the same address."""
        found = self._clients.get(location.origin)
        if found is None:
            limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=8, keepalive_expiry=30.0)
            found = self._clients[location.origin] = httpx2.AsyncClient(
                verify=self._tls, trust_env=False, limits=limits
            )
        return found


def _check_status(response: httpx2.Response) -> None:
    status = response.status_code
    if status == 429 or status >= 500:
        raise _Again(f"the webhook answered {status}", _retry_after_s(response.headers.get("retry-after")))
    if 300 <= status < 400:
        raise CallFailed(f"the webhook answered {status}: redirects are not followed")
    if status != 200:
        raise CallFailed(f"the webhook answered {status}")


def _retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header (a number or a date), at most MAX_RETRY_AFTER_S; None when there is none."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, at - time.time()), MAX_RETRY_AFTER_S)


def _pause_s(attempt: int, after_s: float | None) -> float:
    ceiling = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1))
    return (after_s or 0.0) + random.uniform(ceiling / 2, ceiling)
