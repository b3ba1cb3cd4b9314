"""Names and identifiers: how they are made, and which ones are accepted.

A name becomes a subject token, an S3 prefix and a Redis key, so its alphabet is closed.
Group ids derive from (tenant, run, key, position): the same idempotency key always names the
same group.  A sample is `<group>.<index>`, a turn `<group>.<index>.t<k>`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets

NAME_PATTERN = r"[a-z0-9][a-z0-9-]{0,62}"
"""Tenants: lower case, digits and dashes, 1-63 characters."""

LABEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
"""Runs, policies and sessions: letters, digits, dash and underscore, 1-63 characters."""

_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(LABEL_PATTERN)
NO_SESSION = "-"
REJECTED_RUN = "_rejected"


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_label(text: str) -> bool:
    return _LABEL.fullmatch(text) is not None


def _digest_id(prefix: str, *parts: str) -> str:
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()[:15]
    return prefix + base64.b32encode(digest).decode().lower()


def new_key() -> str:
    """A random key for a request that came without an idempotency key (128 bits)."""
    return secrets.token_hex(16)


def batch_id(tenant: str, run: str, key: str) -> str:
    return _digest_id("b", tenant, run, key)


def group_id(tenant: str, run: str, key: str, position: int) -> str:
    return _digest_id("g", tenant, run, key, str(position))


def post_id(tenant: str, key: str, position: int) -> str:
    """Names the rewards posted onto the group at `position` of one request: a repeat is known by it."""
    return _digest_id("w", tenant, key, str(position))


def idempotency_key(tenant: str, key: str) -> str:
    """The key of a client's idempotency record in the `rg_idem` bucket."""
    return _digest_id("i", tenant, key)


def session_id(group: str, index: int) -> str:
    """The session that plays sample `index` of a group: opening it again names the same one."""
    return _digest_id("s", group, str(index))


def sample_id(group: str, index: int) -> str:
    return f"{group}.{index}"


def turn_id(group: str, index: int, turn: int) -> str:
    return f"{group}.{index}.t{turn}"


def policy_key(tenant: str, policy: str) -> str:
    """The policy's key in `rg_policies`, and its name across tenants."""
    return f"{tenant}.{policy}"


def pool_id(model: str, dtype: str, device: str, region: str) -> str:
    """Who can serve a job: (`policy_key` or base digest, dtype, device class, region) as one subject token."""
    return _digest_id("p", model, dtype, device, region)


def sample_seed(seed: int, index: int, offset: int = 0) -> int:
    """63-bit seed of one sample: hash(group seed, index, resume offset), never `seed + index`.

    Consecutive group seeds then share no sample seed (vLLM's own `n` repeats neighbours).
    """
    digest = hashlib.sha256(f"{seed}\x1f{index}\x1f{offset}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
