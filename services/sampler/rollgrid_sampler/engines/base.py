"""What a sampler asks of an engine.

One sample is one engine request.  Token ids go in and come out; nothing here knows of jobs,
streams or other processes.  An engine either answers, refuses a request with a typed error
(neighbours are not affected), or is dead, which is for ever: the process is restarted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, PromptLogprobs, TopLogprobs
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


class AdapterGone(RollgridError):
    """The LoRA version of a request was unloaded before its end; `so_far` may be continued on another."""

    def __init__(self, version: int, so_far: Sent) -> None:
        message = f"LoRA version {version} was unloaded"
        super().__init__(ErrorCode.VERSION_GONE, message, boundary=Boundary.WEIGHTS, field="weights")
        self.version = version
        self.so_far = so_far


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a sample that its caller has already; generation continues exactly behind it."""

    token_ids: list[int] = []
    logprobs: array[float] = array("f")
    version_spans: tuple[VersionSpan, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate.

    `seed` is the sample's own (already derived), None = unseeded; `group_seed` is what it and those
    of later offsets derive from.  `sample` names the sample for engines that script their answers.
    `cache_salt` separates prefix caches.  Of two requests that wait inside an engine, a `hurried` one
    goes first.  `max_tokens` 0 asks for the prompt's logprobs alone.  `adapter` is the LoRA version it
    runs on, None = the weights alone; `on_refresh` None leaves it to the load.
    """

    request_id: str
    sample: str
    index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    group_seed: int | None = None
    cache_salt: str | None = None
    sent: Sent = Sent()
    hurried: bool = False
    adapter: int | None = None
    on_refresh: OnRefresh | None = None

    def seed_at(self, offset: int) -> int | None:
        """The seed for what follows the first `offset` tokens."""
        if offset == 0 or self.group_seed is None:
            return self.seed
        return ids.sample_seed(self.group_seed, self.index, offset)


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [offset, offset + len) of a sample under way, and the text they release.

    Spans count from the sample's start.  Offset 0 after others says that the sample has started
    again; such a portion may be empty.
    """

    offset: int
    token_ids: list[int]
    logprobs: array[float]
    top_logprobs: TopLogprobs | None = None
    text: str = ""
    version_spans: tuple[VersionSpan, ...] = ()


OnDelta = Callable[[Delta], None]


class Generated(msgspec.Struct, kw_only=True):
    """What came out: as many `logprobs` (f4) as `token_ids`, spans that cover them.  UNIX seconds.

    The first `resumed_from` tokens are those of the request's `sent`; their alternatives are not
    known.  `text_sent` is how much of the text had been released with them.
    """

    token_ids: list[int]
    logprobs: array[float]
    top_logprobs: TopLogprobs | None = None
    text: str = ""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    first_token_at: float = 0.0
    resumed_from: int = 0
    text_sent: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits known once the engine has started.

    `fingerprint_class` is a digest of all that fingerprints may differ by between engines with the same
    weights (build, device class, dtype, parallelism).
    """

    name: str
    max_model_len: int
    vocab_size: int
    logprobs_mode: str = "processed_logprobs"
    max_loras: int = 0
    fingerprint_class: str = ""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that answer now, and the LoRA versions on them with their fingerprints.

    `version` is that of the full weights; -1 while they are in doubt.
    """

    version: int
    fingerprint: str | None = None
    adapters: dict[int, str | None] = {}


class Engine(Protocol):
    """An engine that has one policy's weights loaded at a time."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def loaded(self) -> Loaded: ...

    async def start(self, version: int, folder: Path | None) -> None:
        """Load `folder` as `version` and be ready.  Raises EngineDead."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that came with the weights, None when the engine has none."""

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        """The finished sample.  Cancelling the call aborts the request.

        `on_delta` is called with each portion but the last, which only the result has: all portions
        and the rest of the result, joined, are the sample.

        Raises:
            RequestFailed: this request is refused or has failed.
            EngineDead: the engine is gone.
        """

    async def prepare(self, version: int, folder: Path) -> None:
        """Do beside generation what of `load_version` of the same can be done so, if anything; nothing changes yet.

        Raises WeightsRefused, EngineDead.
        """

    async def load_version(self, version: int, folder: Path, mode: OnRefresh) -> Loaded:
        """Apply `folder` as `version` to a running engine; requests that say nothing else follow `mode`.

        New requests wait meanwhile.  The adapters there were are gone afterwards.  When it returns, no
        request waits any more; while it is under way and after a refusal that is not `intact`, none is answered.

        Raises WeightsRefused, EngineDead.
        """

    async def add_adapter(self, version: int, folder: Path) -> Loaded:
        """Load a LoRA version beside the others; generation goes on.  Raises WeightsRefused (intact), EngineDead."""

    async def remove_adapter(self, version: int, mode: OnRefresh) -> Loaded:
        """Unload a LoRA version: `wait` for its requests, or `abort` them (they raise AdapterGone).  Raises EngineDead."""

    async def health(self) -> None:
        """A round trip through the engine's own loop.  Raises EngineDead."""

    async def close(self) -> None: ...
