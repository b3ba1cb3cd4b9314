"""The operator's allow-list of webhook URLs: what one entry is, and which entry a URL falls under.  Pure.

An entry is `scheme://host[:port][/path prefix]`, then, separated by blanks, `private` (its host may be
an address of a private network or this machine) and `tenant=NAME` (only that tenant may use it).
Hosts are compared as text: a URL whose host is not written as in its entry is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}
_ENCODED = ("%2e", "%2f", "%5c", "%00")
"""Percent-encoded dots and slashes: servers differ in when they decode them, so a prefix proves nothing."""


class Location(NamedTuple):
    """Where a URL points, normalised; `target` is path and query as they are sent."""

    scheme: str
    host: str
    port: int
    path: str
    target: str

    @property
    def netloc(self) -> str:
        """As a Host header says it: without the scheme's own port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.netloc}"


class Allowed(NamedTuple):
    """One entry of the list; `text` is its URL as the operator wrote it."""

    text: str
    location: Location
    private: bool = False
    tenant: str | None = None

    def covers(self, location: Location) -> bool:
        mine = self.location
        if (mine.scheme, mine.host, mine.port) != (location.scheme, location.host, location.port):
            return False
        return location.path == mine.path or location.path.startswith(mine.path.rstrip("/") + "/")


def parse_url(text: str) -> Location:
    """The place a webhook URL points to; raises ValueError saying what is wrong with it."""
    if len(text) > MAX_URL_CHARS:
        raise ValueError(f"the URL has more than {MAX_URL_CHARS} characters")
    if not text.isascii() or not text.isprintable() or any(character in " \\" for character in text):
        raise ValueError("the URL has characters that do not belong into one")
    parts = urlsplit(text)
    if parts.scheme not in _PORTS:
        raise ValueError("the URL is neither http:// nor https://")
    if "@" in parts.netloc:
        raise ValueError("the URL carries credentials")
    if "#" in text:
        raise ValueError("the URL has a fragment")
    port = parts.port  # raises ValueError for what is no port
    if not parts.hostname or port == 0:
        raise ValueError("the URL has no host" if not parts.hostname else "the URL has port 0")
    path = parts.path or "/"
    if any(segment in (".", "..") for segment in path.split("/")) or any(code in path.lower() for code in _ENCODED):
        raise ValueError("the URL's path has relative or encoded segments")
    target = path + (f"?{parts.query}" if parts.query else "")
    return Location(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path, target)


def parse_allowed(text: str) -> Allowed:
    """One entry of the list; raises ValueError."""
    url, *words = text.split()
    location = parse_url(url)
    if location.target != location.path:
        raise ValueError(f"the allow-list entry {url!r} has a query")
    private, tenant = False, None
    for word in words:
        if word == "private":
            private = True
        elif word.startswith("tenant="):
            tenant = word.removeprefix("tenant=")
        else:
            raise ValueError(f"the allow-list entry {url!r} has the unknown word {word!r}")
    return Allowed(url, location, private, tenant)


class WebhookParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ScorerSpec.params` of a webhook: where, whether the sampled ids go along, and what is sent on as it is."""

    url: str
    token_ids: bool = False
    extra: dict[str, Any] = {}


class AllowList:
    """The entries of a deployment; an empty list allows nothing."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self.entries = tuple(map(parse_allowed, entries))

    def __bool__(self) -> bool:
        return bool(self.entries)

    def find(self, url: str, tenant: str) -> tuple[Location, Allowed]:
        """The URL's place and the entry it falls under, the longest prefix first; raises ValueError."""
        location = parse_url(url)
        covering = [entry for entry in self.entries if entry.covers(location) and entry.tenant in (None, tenant)]
        if not covering:
            raise ValueError("the URL is not on the operator's allow-list")
        return location, max(covering, key=lambda entry: (len(entry.location.path), entry.tenant is not None))
