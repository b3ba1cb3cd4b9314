"""Reading a session: its fold from Redis, and what is behind it in the stream; whatever was lost is rebuilt first."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import msgspec
from rollgrid_contracts import keys
from rollgrid_contracts.episodes import SessionForked
from rollgrid_contracts.samples import SamplesFinished
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.state import Argument, State, StateError

from . import metrics, session_lua
from .ledger_client import LedgerClient
from .session_episode import Episode, Recent, episode_of, fields_of, folded, generation_of
from .session_events import events_behind
from .session_rebuild import Rebuilder
from .session_refusals import rebuilding, state_at_hand
from .settings import IngestSettings

log = get_logger(__name__)

ATTEMPTS = 16
"""A transition that finds the fold changed reads again, so often at most."""
BEHIND_S = 0.05
"""A server of a replicated stream may answer before it has what was just stored: it is asked again after so long."""


class Episodes:
    """Every read folds what it found into Redis, so that the next one need not."""

    def __init__(
        self,
        state: State,
        bus: Bus,
        ledger: LedgerClient,
        settings: IngestSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._clock = bus, clock
        self.rebuilder = Rebuilder(
            state, bus, ledger, lock_s=settings.session_rebuild_s, wait_s=settings.session_rebuild_wait_s
        )
        self._recent = Recent(settings.session_cache_tokens)
        self._scripts = {name: state.script(source) for name, source in session_lua.ALL.items()}
        self.scheduled = asyncio.Event()

    async def read(self, tenant: str, session: str, *, at_least: int = 0) -> Episode:
        """The session with everything the stream has of it (up to RG_SAMPLES sequence `at_least` for certain).

        Raises not_found, episode_rebuilding, BusError, StorageError.
        """
        for _ in range(ATTEMPTS):
            with state_at_hand():
                episode = await self.load(tenant, session)
                if episode is None:
                    await self._rebuild(tenant, session)
                    continue
            caught_up = await self._catch_up(tenant, session, episode)
            if caught_up is None:
                metrics.SESSION_RACES.inc()
            elif caught_up.at >= at_least:
                return caught_up
            else:  # a replica of the stream that is behind answered
                await asyncio.sleep(BEHIND_S)
        raise rebuilding("it changes faster than it can be read")

    async def load(self, tenant: str, session: str) -> Episode | None:
        known = self._recent.get(tenant, session)
        generation, at = (known.generation, known.at) if known else ("", 0)
        flat: list[bytes] = await self.run("LOAD", keys.session(tenant, session), generation, at)
        if not flat:
            return None
        fields = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        try:
            return self._recent.put(episode_of(fields, known))
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            # somebody else wrote there, or another version of this program: as good as gone
            log.warning("fold_unreadable", session=session, error=repr(error))
            await self.run("DROP", keys.session(tenant, session), generation_of(fields))
            return None

    async def _rebuild(self, tenant: str, session: str) -> None:
        self._recent.drop(tenant, session)
        await self.rebuilder.rebuild(tenant, session)
        episode = await self.load(tenant, session)
        if episode is not None and episode.ended is None:
            await self.schedule(tenant, session, episode.expires_at)
            forget_at = min(episode.until, self._clock() + 2 * keys.SESSION_TTL_S)
            await self.run("ADMIT", keys.open_sessions(tenant), session, self._clock(), forget_at, 1 << 30)

    async def _catch_up(self, tenant: str, session: str, episode: Episode) -> Episode | None:
        """The episode with what is behind it in the stream, folded into Redis too; None when Redis has moved on."""
        events = await events_behind(self._bus, tenant, session, episode.at)
        if not events:
            return episode
        tree = folded(episode, events)
        settled = [turn for turn in episode.open_turns if turn in tree.nodes or turn in tree.lost]
        forked = [branch for branch in tree.forks if branch not in episode.tree.forks]
        last = max((at for _, event, at in events if isinstance(event, SamplesFinished | SessionForked)), default=0.0)
        fields = fields_of(tree, events, episode.tree)
        pairs = [part for pair in fields.items() for part in pair]
        with state_at_hand():
            answer = await self.run(
                "FOLD",
                keys.session(tenant, session),
                episode.generation,
                episode.at,
                keys.SESSION_TTL_S,
                ",".join(map(str, settled)),
                ",".join(forked),
                tree.next_turn,
                last,
                *pairs,
            )
            if answer != b"ok":
                return None
        if tree.ended is not None:
            await self.leave(tenant, session)
        return self._recent.put(
            dataclasses.replace(
                episode,
                tree=tree,
                at=tree.events_to,
                next_turn=max(episode.next_turn, tree.next_turn),
                last_active=max(episode.last_active, last),
                open_turns={turn: held for turn, held in episode.open_turns.items() if turn not in settled},
            )
        )

    async def run(self, script: str, name: str, *arguments: Argument) -> Any:
        return await self._scripts[script]([name], *arguments)

    async def schedule(self, tenant: str, session: str, at: float) -> None:
        await self.run("SCHEDULE", keys.session_expiry(), f"{tenant}:{session}", at)
        self.scheduled.set()

    async def leave(self, tenant: str, session: str) -> None:
        """It counts as open no longer.  Never fails: what stays is forgotten in time."""
        with contextlib.suppress(StateError):
            await self.run("LEAVE", keys.open_sessions(tenant), session)
            await self.run("LEAVE", keys.session_expiry(), f"{tenant}:{session}")
