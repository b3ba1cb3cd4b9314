"""API keys: who calls, and what the key allows.  The tenant comes from the key, from nowhere else."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger

from .settings import IngestSettings

log = get_logger(__name__)
LOCAL_TENANT = "local"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Scope(StrEnum):
    SUBMIT = "submit"
    READ = "read"
    ADMIN = "admin"


_tenant: ContextVar[str] = ContextVar("rollgrid_tenant", default="")


@contextlib.contextmanager
def serving(tenant: str) -> Iterator[None]:
    """Work done inside is this tenant's, whatever calls lie between."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def tenant_served() -> str:
    """The tenant whose work this is; empty for nobody's."""
    return _tenant.get()


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    scopes: frozenset[Scope]

    def require(self, scope: Scope) -> None:
        """Raises forbidden unless the key carries `scope`."""
        if scope not in self.scopes:
            raise RollgridError(
                ErrorCode.FORBIDDEN,
                f"this key lacks the scope {scope.value}",
                boundary=Boundary.CLIENT,
                limit=scope.value,
            )


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the keys file: the sha256 (hex) of a key, never the key."""

    key_sha256: str
    tenant: str
    scopes: tuple[Scope, ...] = (Scope.SUBMIT, Scope.READ)
    name: str = ""


class StartRefused(RollgridError):
    """Ingest must not start like this."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message)


class Keys:
    """The keys in force.  Without a keys file everybody is the tenant "local", on loopback only."""

    def __init__(self, entries: tuple[KeyEntry, ...] | None) -> None:
        self._path: Path | None = None
        self._stamp = (0, 0)
        self._entries: tuple[tuple[bytes, Principal], ...] | None = None if entries is None else _prepared(entries)

    @classmethod
    def from_settings(cls, settings: IngestSettings) -> Keys:
        """Raises StartRefused when keys are missing where they are needed, or cannot be read."""
        if settings.keys_file is None:
            if not settings.loopback:
                raise StartRefused(
                    f"refusing to serve {settings.host} without API keys: set ROLLGRID_INGEST_KEYS_FILE or bind to loopback"
                )
            return cls(None)
        keys = cls(_read(settings.keys_file))
        keys._path, keys._stamp = settings.keys_file, _stamp(settings.keys_file)
        return keys

    @property
    def open_door(self) -> bool:
        return self._entries is None

    @property
    def submitters(self) -> frozenset[str]:
        """Tenants that hold a key which may submit."""
        if self._entries is None:
            return frozenset({LOCAL_TENANT})
        return frozenset(principal.tenant for _, principal in self._entries if Scope.SUBMIT in principal.scopes)

    def share(self, wanted: float) -> float:
        """The part of what is shared that one tenant may take: all of it where there is one tenant only."""
        if self._entries is None or len({principal.tenant for _, principal in self._entries}) == 1:
            return 1.0
        return wanted

    def reload(self) -> None:
        """Read the file again if it has changed; a broken file leaves the old keys in force."""
        if self._path is None:
            return
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._entries = _prepared(_read(self._path))
            self._stamp = stamp
            log.info("keys_reloaded", keys=len(self._entries))
        except (StartRefused, OSError) as error:
            log.error("keys_not_reloaded", error=str(error))

    def authenticate(self, authorization: str | None) -> Principal:
        """The caller behind an Authorization header.  Raises unauthenticated."""
        if self._entries is None:
            return Principal(tenant=LOCAL_TENANT, scopes=frozenset(Scope))
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _unauthenticated("an API key is required: Authorization: Bearer <key>")
        digest = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
        found: Principal | None = None
        for known, principal in self._entries:  # all of them, whichever matches
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise _unauthenticated("unknown API key")
        return found


def _unauthenticated(message: str) -> RollgridError:
    return RollgridError(ErrorCode.UNAUTHENTICATED, message, boundary=Boundary.CLIENT, field="Authorization")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino


def _read(path: Path) -> tuple[KeyEntry, ...]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[KeyEntry, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise StartRefused(f"keys file {path}: {error}") from error


def _prepared(entries: tuple[KeyEntry, ...]) -> tuple[tuple[bytes, Principal], ...]:
    prepared = []
    for entry in entries:
        if not ids.is_name(entry.tenant) or entry.tenant == "shared":
            raise StartRefused(f"keys file: {entry.tenant!r} is not a tenant name ({ids.NAME_PATTERN}, not 'shared')")
        if not _SHA256.fullmatch(entry.key_sha256):
            raise StartRefused(f"keys file: key_sha256 of {entry.tenant} is not 64 lower-case hex digits")
        prepared.append(
            (bytes.fromhex(entry.key_sha256), Principal(tenant=entry.tenant, scopes=frozenset(entry.scopes)))
        )
    return tuple(prepared)
