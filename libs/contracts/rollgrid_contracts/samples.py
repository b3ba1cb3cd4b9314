"""What samplers and ingest say of samples: events on RG_SAMPLES, frames on core NATS."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .arrays import Floats, TokenIds
from .episodes import TurnNode
from .failures import ErrorInfo
from .jobs import Resume, SamplingParams, Session, VersionSpan
from .scoring import ScorerSpec


class BlobRef(msgspec.Struct, frozen=True, kw_only=True, tag="blob_ref"):
    """Claim check for a payload over `topology.INLINE_LIMIT`: an object in S3 and its digest."""

    key: str
    sha256: str
    size: int


class SampleStatus(StrEnum):
    """Terminal status of one sample (or turn)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class FinishReason(StrEnum):
    """Why generation ended, as the engine said; never merged into fewer values."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class Parsed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Generated text as the model's parsers read it; `parse_status` is ok | malformed | none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    parse_status: str = "none"


class Timings(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """UNIX seconds at which the sample was dequeued, started, gave its first token and finished."""

    dequeued_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0


class TopLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Alternatives per position, ragged: position i owns entries [offsets[i], offsets[i+1]).

    Non-finite entries are dropped, so a position may hold fewer than were asked for.
    """

    offsets: TokenIds
    token_ids: TokenIds
    logprobs: Floats


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Logprob of each prompt token given those before it: f4, one per prompt token but the first.

    `ranks` (1 = most likely) are u4, as long; `top` holds the alternatives of the same positions.
    They are those of the model before temperature and cut-offs (`mode`), as in vLLM.
    """

    logprobs: Floats
    ranks: TokenIds = TokenIds()
    top: TopLogprobs | None = None
    mode: str = "raw_logprobs"


class Sample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One finished sample (or turn of one): the terminal entry before scores are added.

    `prompt_logprobs`, when asked for, are on the first sample of each job only: all share the prompt.

    `token_ids` and `logprobs` have equal length; EOS and stop tokens stay in.  `seed` is the
    sample's own 63-bit seed, None when unseeded.  `version_spans` cover [0, len(token_ids)).
    `node` is where a session's turn stands in its tree; `turn` is then the turn's number.
    `weight_fingerprint` is that of the last span's version; `fingerprint_confirmed` once a cold load gave the same.
    """

    index: int
    turn: int = 0
    attempt: int = 1
    status: SampleStatus
    token_ids: TokenIds = TokenIds()
    logprobs: Floats = Floats()
    top_logprobs: TopLogprobs | None = None
    text: str | None = None
    parsed: Parsed | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    weight_fingerprint: str | None = None
    seed: int | None = None
    resumed_from: int = 0
    worker: str = ""
    cached_tokens: int = 0
    timings: Timings = Timings()
    routed_experts: BlobRef | None = None
    kept_tokens: BlobRef | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: PromptLogprobs | None = None
    fingerprint_confirmed: bool = False
    node: TurnNode | None = None


class ScoringTask(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What scorers need beside the samples; travels only while a scorer must still act."""

    scorers: tuple[ScorerSpec, ...]
    prompt_text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    deadline: float = 0.0


class SamplesFinished(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="samples_finished"):
    """Event: samples of one group have ended.  sampler or ingest → ledger, scorers.

    `job_seq` is the RG_JOBS sequence of the job (the ledger waits until it has read it), `fence`
    that of the turn's dispatch.  `incarnation` names the worker process.

    With `job_seq` 0 and n failed samples it is ingest's refusal of a submission that never became a
    job: the group closes as rejected, stored in `record_format`.
    """

    tenant: str
    run: str
    batch_id: str
    group_id: str
    n: int
    policy: str
    job_seq: int
    fence: int = 0
    incarnation: str = ""
    engine: str = ""
    logprobs_mode: str = "processed_logprobs"
    model_max_len: int = 0
    sampling: SamplingParams | None = None
    session: Session | None = None
    samples: tuple[Sample, ...]
    scoring: ScoringTask | None = None
    traceparent: str | None = None
    record_format: str = "msgpack"


class GroupsCancelled(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="groups_cancelled"):
    """Event: the caller wants these groups (or the whole batch) ended.  ingest → ledger.

    Applied once the ledger has read RG_JOBS up to `job_seq`; first in stream order wins.
    """

    tenant: str
    run: str
    batch_id: str
    group_ids: tuple[str, ...] = ()
    job_seq: int = 0
    reason: str = "cancelled by the caller"
    traceparent: str | None = None


class TokenFrame(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="token_frame"):
    """Core-NATS frame of a streamed sample: tokens [offset, offset + len) of `attempt`.

    `text` is what these tokens add to the visible text (of a parsed sample: to its content),
    `reasoning` to its reasoning, `tool_calls` are deltas in OpenAI's shape.
    """

    group_id: str
    index: int
    attempt: int
    offset: int
    token_ids: TokenIds
    logprobs: Floats
    text: str = ""
    spans: tuple[VersionSpan, ...] = ()
    top_logprobs: TopLogprobs | None = None
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, tag="stream_query"):
    """Question of a redelivered worker to whoever streams the group: what was sent already?"""

    group_id: str


class StreamState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="stream_state"):
    """Answer: per sample of the group, exactly what the client has; samples without an entry have nothing."""

    group_id: str
    sent: tuple[Resume, ...] = ()


class SampleReply(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="sample_reply"):
    """Core-NATS reply sent after the durable event: finished samples equal to the record."""

    group_id: str
    prompt_tokens: int
    logprobs_mode: str
    samples: tuple[Sample, ...]
