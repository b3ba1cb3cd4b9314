"""A durable place to resume from: where a trainer's reading of a batch or run stands."""

from __future__ import annotations

import json
import os
import pathlib

from .errors import CursorMismatch

_SCHEMA = 1


class CursorFile:
    """The last committed cursor, in one small file that a crash leaves either old or new.

    A commit is a write to a neighbour file, fsync, atomic rename, fsync of the folder.  Iterators
    that are given the file commit a group when the *next* one is asked for: after a crash the group
    in hand comes again (at least once, never skipped).  `every` commits only each n-th time, for
    consumers that take thousands of groups a second and can take the last n again.

    The first commit writes what is being read (`batch:<id>` or `run:<name>`); reading something
    else with the same file raises `CursorMismatch` instead of silently skipping data.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.path = pathlib.Path(path)
        self._every = every
        self._since_write = 0
        self._pending: tuple[int, str] | None = None

    def read(self, scope: str = "") -> int:
        """The committed cursor, 0 when nothing was committed yet.

        Raises:
            CursorMismatch: the file is damaged, or belongs to another scope.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        try:
            state = json.loads(content)
            cursor, owner, schema = int(state["cursor"]), str(state["scope"]), int(state["schema"])
        except (ValueError, KeyError, TypeError) as error:
            raise CursorMismatch(f"{self.path} is not a cursor file: {error!r}") from error
        if schema > _SCHEMA:
            raise CursorMismatch(f"{self.path} was written by a newer rollgrid (schema {schema})")
        if scope and owner and owner != scope:
            raise CursorMismatch(f"{self.path} is the cursor of {owner}, not of {scope}")
        return cursor

    def commit(self, cursor: int, scope: str = "") -> None:
        """Store `cursor` durably; with `every` > 1 perhaps at a later commit or `flush`."""
        self._pending = (cursor, scope)
        self._since_write += 1
        if self._since_write >= self._every:
            self.flush()

    def flush(self) -> None:
        """Make the last commit durable now."""
        if self._pending is None:
            return
        cursor, scope = self._pending
        body = json.dumps({"schema": _SCHEMA, "scope": scope, "cursor": cursor}).encode()
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with open(beside, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)
        _sync_folder(self.path.parent)
        self._pending = None
        self._since_write = 0


def _sync_folder(folder: pathlib.Path) -> None:
    """Make a rename in `folder` survive a power cut; Windows offers no such call and needs none."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
