"""Imports nats-py so that it never imports aiohttp, even where an engine has brought that: a sixth of a service's start
(it makes two TLS contexts while it is imported, measured), and nats-py uses it for `ws://` alone."""

from __future__ import annotations

import sys

if "nats" not in sys.modules and "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        import nats.aio.client  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
