"""Reading closed groups in order: where a reader stands, free of any I/O.

Pages carry stream sequences, which only grow.  A reader therefore knows a repeated group by its
cursor alone, in constant memory, whatever the server sends again after a reconnect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from .answers import Page
from .cursor import CursorFile
from .results import Group
from .transport import Call

P = TypeVar("P")


class Numbered(Protocol):
    """What a reader gives: it knows where to resume."""

    cursor: int


T = TypeVar("T", bound=Numbered)

PageCall: TypeAlias = "Callable[[int, float, float], Call[P]]"
"""(cursor, seconds to wait for news, read timeout) to the call for the page behind the cursor."""

LONG_POLL_S = 20.0
"""The server holds an empty page back for so long; below the idle timeout of common proxies."""

_READ_MARGIN_S = 15.0


class Reader(Generic[P, T]):
    """The state of one iterator over a batch (`scope` "batch:<id>"), a run ("run:<name>") or its rewards."""

    def __init__(
        self,
        page_call: PageCall[P],
        *,
        scope: str,
        cursor: int | CursorFile,
        follow: bool = True,
        timeout_s: float | None = None,
        expected: Iterable[str] = (),
        exists: Call[Any] | None = None,
    ) -> None:
        """`timeout_s` bounds the whole iteration; without `follow` it ends at the first empty page.

        It also ends when all of `expected` (group ids) have been read, and when `exists`, asked after
        an empty page, is answered NotFound: the server forgets a batch only when all of it has closed
        and left for the archive.
        """
        self._page_call = page_call
        self._scope = scope
        self._file = cursor if isinstance(cursor, CursorFile) else None
        self._follow = follow
        self.cursor = cursor.read(scope) if isinstance(cursor, CursorFile) else cursor
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.done = False
        self._exists = exists
        self._missing = set(expected)

    @property
    def durable(self) -> bool:
        """Consuming a group writes to disk."""
        return self._file is not None

    def next_call(self) -> Call[P]:
        wait_s = 0.0
        if self._follow:
            wait_s = LONG_POLL_S
            if self.deadline is not None:
                wait_s = max(0.0, min(wait_s, self.deadline - time.monotonic()))
        return self._page_call(self.cursor, wait_s, wait_s + _READ_MARGIN_S)

    def accept(self, page: P) -> list[T]:
        """What is in `page` and has not been had yet."""
        raise NotImplementedError

    def doubt(self, fresh: list[T]) -> Call[Any] | None:
        """What to ask before waiting on: whether there still is such a batch."""
        return None if fresh or self.done else self._exists

    def consumed(self, item: T) -> None:
        """The consumer asked for the next one: this one need not come again."""
        if self._file is not None:
            self._file.commit(item.cursor, self._scope)

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()


class GroupReader(Reader[Page, Group]):
    """Reads closed groups."""

    def accept(self, page: Page) -> list[Group]:
        """The groups of `page` that this reader has not had yet."""
        fresh = []
        for item in page.groups:
            if item.cursor > self.cursor:
                self.cursor = item.cursor
                fresh.append(Group(item.group, item.cursor, staleness=item.staleness))
        self.cursor = max(self.cursor, page.cursor)
        self.done = page.done or (not self._follow and not page.groups)
        if self._missing:
            self._missing.difference_update(group.id for group in fresh)
            self.done = self.done or not self._missing
        return fresh
