"""Which server to talk to: what the caller says, else the environment, else the stack running here."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse

from .errors import ConfigurationError

URL_VARIABLE = "ROLLGRID_URL"
KEY_VARIABLE = "ROLLGRID_API_KEY"
PATIENCE_VARIABLE = "ROLLGRID_PATIENCE_S"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Base URL of an ingest, without a trailing slash, and the bearer key for it."""

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)


def resolve(base_url: str | None = None, api_key: str | None = None) -> Endpoint:
    """The server to use.

    The URL is `base_url`, else $ROLLGRID_URL, else that of the stack which `rollgrid up` runs on this
    machine (its state file also holds the key).  The key is `api_key`, else $ROLLGRID_API_KEY, else
    the local stack's if the URL is the local stack's.

    Raises:
        ConfigurationError: no server is named and none runs here, or the URL is not http(s).
    """
    url = base_url or os.environ.get(URL_VARIABLE)
    key = api_key or os.environ.get(KEY_VARIABLE)
    if url is None or key is None:
        local = _local_stack()
        if local is not None and (url is None or _same(url, local.url)):
            url, key = local.url, key or local.api_key
    if url is None:
        raise ConfigurationError(f"no server: pass base_url, set {URL_VARIABLE}, or start one here with `rollgrid up`")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(f"{url!r} is not an http or https URL")
    return Endpoint(url.rstrip("/").removesuffix("/v1"), key)


def patience_s() -> float:
    """How long a command tries to reach the server: $ROLLGRID_PATIENCE_S, else 15 seconds.

    Following a batch or run bears the longer outages of `Retries` all the same.
    """
    text = os.environ.get(PATIENCE_VARIABLE, "15")
    try:
        return float(text)
    except ValueError as error:
        raise ConfigurationError(f"{PATIENCE_VARIABLE} is {text!r}, not a number of seconds") from error


def _same(left: str, right: str) -> bool:
    return left.rstrip("/").removesuffix("/v1") == right.rstrip("/")


def _local_stack() -> Endpoint | None:
    try:
        from .stack.home import find_stack
    except ModuleNotFoundError:  # a client-only installation
        return None
    found = find_stack()
    return None if found is None else Endpoint(found.url, found.api_key)
