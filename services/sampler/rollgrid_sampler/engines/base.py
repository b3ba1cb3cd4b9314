"""What a sampler asks of an engine.

One sample is one engine request.  Token ids go in and come out; nothing here knows of jobs,
streams or other processes.  An engine either answers, refuses a request with a typed error
(neighbours are not affected), or is dead, which is for ever: the process is restarted.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, TopLogprobs
from rollgrid_runtime.errors import RollgridError


class EngineDead(RollgridError):
    """The engine will not answer again; whatever it held is lost."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.ENGINE_UNAVAILABLE, message, boundary=Boundary.ENGINE)


class RequestFailed(RollgridError):
    """The engine failed or refused this one request."""

    def __init__(
        self,
        message: str,
        code: ErrorCode = ErrorCode.ENGINE_ERROR,
        *,
        field: str | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(code, message, boundary=Boundary.ENGINE, field=field, limit=limit)


class WeightsRefused(RollgridError):
    """A version could not be applied.  `intact` tells whether the old weights still answer."""

    def __init__(self, message: str, *, intact: bool) -> None:
        super().__init__(ErrorCode.VERSION_UNAVAILABLE, message, boundary=Boundary.WEIGHTS)
        self.intact = intact


class SwapMode(StrEnum):
    """What happens to requests in flight when new weights are applied."""

    WAIT = "wait"
    """They end under the old weights first; new requests wait."""
    ABORT = "abort"
    """They start again from zero under the new weights."""
    KEEP = "keep"
    """They go on under the new weights, their KV recomputed; spans record the seam."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate.

    `seed` is the sample's own (already derived), None = unseeded.  `sample` names the sample for
    engines that script their answers.  `cache_salt` separates prefix caches.
    """

    request_id: str
    sample: str
    index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    cache_salt: str | None = None


class Generated(msgspec.Struct, kw_only=True):
    """What came out: as many `logprobs` (f4) as `token_ids`, spans that cover them.  UNIX seconds."""

    token_ids: list[int]
    logprobs: array[float]
    top_logprobs: TopLogprobs | None = None
    text: str = ""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    first_token_at: float = 0.0


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits known once the engine has started."""

    name: str
    max_model_len: int
    vocab_size: int
    logprobs_mode: str = "processed_logprobs"


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that answer now."""

    version: int
    fingerprint: str | None = None


class Engine(Protocol):
    """An engine that has one policy's weights loaded at a time."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def loaded(self) -> Loaded: ...

    async def start(self, version: int, folder: Path | None) -> None:
        """Load `folder` as `version` and be ready.  Raises EngineDead."""

    async def generate(self, request: GenerationRequest) -> Generated:
        """The finished sample.  Cancelling the call aborts the request.

        Raises:
            RequestFailed: this request is refused or has failed.
            EngineDead: the engine is gone.
        """

    async def load_version(self, version: int, folder: Path, mode: SwapMode) -> Loaded:
        """Apply `folder` as `version`.  Raises WeightsRefused, EngineDead."""

    async def health(self) -> None:
        """A round trip through the engine's own loop.  Raises EngineDead."""

    async def close(self) -> None: ...
