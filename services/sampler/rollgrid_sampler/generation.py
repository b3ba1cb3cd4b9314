"""One sample on its way through the engine; on a LoRA policy perhaps over several versions.

The version is chosen when the sample starts.  If its LoRA version goes, or a newer one comes and the
request is not to wait, the sample goes on under another behind the tokens it has, where that is exact.
Full weights change under a running request inside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array

import msgspec
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import OnRefresh, SampleGroup, VersionRule, VersionSpan
from rollgrid_contracts.samples import TopLogprobs
from rollgrid_runtime.errors import RollgridError

from . import alternatives
from .engines.base import AdapterGone, Delta, Engine, Generated, GenerationRequest, OnDelta, Sent
from .resume import allowed, continuable
from .weights import Weights

GAP_S = 10.0
"""A sample that has lost its version waits so long for one that may go on with it."""


class ConstraintLost(Exception):
    """Nothing that is loaded may serve the job any more, or what came out may not stand."""


class VersionLost(RollgridError):
    """The version that makes a whole group went before its last sample."""

    def __init__(self, version: int, grace_s: float) -> None:
        super().__init__(
            ErrorCode.VERSION_GONE,
            f"the group is pinned to version {version}, which is loaded here no more",
            boundary=Boundary.WEIGHTS,
            field="weights",
            limit=f"{grace_s:g} s of grace",
        )


class Told:
    """The portions of a sample as its caller has them.

    The first `given` tokens were there before; `text` counts the characters released since, `before` those
    of them that came before the present version.
    """

    def __init__(self, sent: Sent, on_delta: OnDelta | None) -> None:
        self._on_delta = on_delta
        self.begin(sent)
        self.first_at = 0.0

    def begin(self, sent: Sent) -> None:
        self.token_ids, self.logprobs = list(sent.token_ids), array("f", sent.logprobs)
        self.spans = list(sent.version_spans)
        self.given, self.text, self.before = len(sent.token_ids), 0, 0
        self.tops: list[TopLogprobs | None] = []

    def take(self, delta: Delta) -> None:
        if delta.offset != len(self.token_ids):  # it started again
            self.begin(Sent())
        if delta.token_ids:
            self.first_at = self.first_at or time.time()
            self.tops.append(delta.top_logprobs)
        self.token_ids += delta.token_ids
        self.logprobs.extend(delta.logprobs)
        for span in delta.version_spans:
            if self.spans and self.spans[-1].version == span.version:
                span = VersionSpan(version=span.version, start=self.spans.pop().start, end=span.end)
            self.spans.append(span)
        self.text += len(delta.text)
        if self._on_delta is not None:
            self._on_delta(delta)

    def restart(self) -> None:
        self.begin(Sent())
        if self._on_delta is not None:
            self._on_delta(Delta(offset=0, token_ids=[], logprobs=array("f")))

    @property
    def so_far(self) -> Sent:
        return Sent(token_ids=list(self.token_ids), logprobs=self.logprobs[:], version_spans=tuple(self.spans))


class Generation:
    """`pin` is the one version that must make the sample; `grace_s` only goes into the message."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        job: SampleGroup,
        request: GenerationRequest,
        *,
        pin: int | None,
        mode: OnRefresh,
        grace_s: float,
        on_delta: OnDelta | None,
    ) -> None:
        self._engine, self._weights, self._job, self._request = engine, weights, job, request
        self._pin, self._grace_s, self._on_delta = pin, grace_s, on_delta
        self._mode = OnRefresh.WAIT if pin is not None else job.on_refresh or mode

    async def run(self) -> Generated:
        """Raises RollgridError (EngineDead, VersionLost, …), ConstraintLost."""
        request, told, turns = self._request, None, 0
        while True:
            request = self._on(request, await self._version(), turns)
            if request.adapter is None and told is None:
                return self._checked(await self._engine.generate(request, self._on_delta))
            told = told or Told(request.sent, self._on_delta)
            result = await self._turn(request, told)
            if result is not None:
                return self._checked(self._whole(result, request, told))
            request = msgspec.structs.replace(request, sent=self._behind(told))
            turns += 1

    async def _version(self) -> int:
        if self._pin is not None:
            if not self._weights.has(self._pin):
                raise VersionLost(self._pin, self._grace_s)
            return self._pin
        constraint = self._job.weights
        version = self._weights.choose(constraint)
        if version is None and constraint.rule is not VersionRule.EXACT:  # one goes before the next comes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GAP_S):
                    await self._weights.moved(-1, constraint)
            version = self._weights.choose(constraint)
        if version is None:
            raise ConstraintLost
        return version

    def _on(self, request: GenerationRequest, version: int, turns: int) -> GenerationRequest:
        adapter = version if self._weights.is_adapter(version) else None
        return msgspec.structs.replace(
            request,
            request_id=f"{self._request.request_id}.{turns}" if turns else request.request_id,
            adapter=adapter,
            on_refresh=self._job.on_refresh,
            cache_salt=f"{self._job.tenant}/{self._job.cache_salt or ''}",  # the engine adds what it runs on
        )

    @property
    def _portions(self) -> bool:
        """Whether tokens are told as they come: somebody wants them, or may have to go on behind them."""
        return self._on_delta is not None or self._mode is not OnRefresh.WAIT

    async def _turn(self, request: GenerationRequest, told: Told) -> Generated | None:
        """The sample, None when it has to go on under another version (`told` has what there is)."""
        take = told.take if self._portions else None
        if request.adapter is None:
            return await self._engine.generate(request, take)
        with self._weights.use(request.adapter):
            generating = asyncio.create_task(self._engine.generate(request, take))
            try:
                if self._moves and await self._moved_first(request.adapter, generating):
                    generating.cancel()
                    await asyncio.wait([generating])
                    if generating.cancelled():
                        return None
                return await generating
            except AdapterGone as gone:
                if not self._portions:
                    told.begin(gone.so_far)
                return None
            finally:
                if not generating.done():
                    generating.cancel()
                    await asyncio.wait([generating])

    @property
    def _moves(self) -> bool:
        """Whether the request leaves its version for a newer one: by `keep` only where nothing is lost."""
        if self._mode is OnRefresh.KEEP:
            return continuable(self._request.sampling)
        return self._mode is OnRefresh.ABORT

    async def _moved_first(self, version: int, generating: asyncio.Task[Generated]) -> bool:
        """Wait for the end of the request or for a newer version; whether that came first."""
        moved = asyncio.create_task(self._weights.moved(version, self._job.weights))
        try:
            await asyncio.wait([generating, moved], return_when=asyncio.FIRST_COMPLETED)
            return not generating.done()
        finally:
            moved.cancel()
            await asyncio.wait([moved])

    def _behind(self, told: Told) -> Sent:
        """What the next version goes on behind; nothing where that is not exact."""
        so_far = told.so_far
        if (
            so_far.token_ids
            and continuable(self._request.sampling)
            and allowed(self._job.weights, so_far.version_spans)
        ):
            told.before = told.text
            return so_far
        told.restart()
        return Sent()

    def _whole(self, result: Generated, request: GenerationRequest, told: Told) -> Generated:
        """The last turn's result as that of all of them."""
        behind = len(request.sent.token_ids)
        if behind <= told.given or result.resumed_from < behind:
            return result
        result.text_sent -= told.before  # of what was released with `sent`, this is its caller's from us
        result.first_token_at = told.first_at or result.first_token_at
        known = [top for top in told.tops if top is not None]
        if result.top_logprobs is not None and len(known) == len(told.tops):
            own = alternatives.rows(alternatives.joined(known), 0, behind - told.given)
            rest = alternatives.rows(result.top_logprobs, behind, len(result.token_ids))
            parts = [part for part in (alternatives.empty(told.given), own, rest) if part is not None]
            result.top_logprobs = alternatives.joined(parts)
        return result

    def _checked(self, result: Generated) -> Generated:
        spans = result.version_spans
        if self._pin is not None and any(span.version != self._pin for span in spans):
            raise VersionLost(self._pin, self._grace_s)
        if not allowed(self._job.weights, spans):
            raise ConstraintLost
        return result
