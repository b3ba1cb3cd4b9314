"""Work on its way to the samplers: `SampleGroup` and what it carries."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .arrays import Floats, TokenIds
from .episodes import TurnNode
from .scoring import ScorerSpec


class Priority(StrEnum):
    """Scheduling class of a job; a token of its subject."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BULK = "bulk"


class Purpose(StrEnum):
    """What a grant allows to be done with a record."""

    EXECUTE = "execute"
    EVALUATE = "evaluate"
    TRAIN = "train"
    EXPORT = "export"
    RETAIN = "retain"


class Rights(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Rights that travel with a job and its record; absent purposes are denied."""

    purposes: tuple[Purpose, ...] = ()
    grant_id: str | None = None


class VersionRule(StrEnum):
    LATEST = "latest"
    EXACT = "exact_version"
    MIN = "min_version"
    MAX_STALENESS = "max_staleness"


class WeightConstraint(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Which checkpoint versions may serve the job; `value` is a version, or positions of staleness."""

    rule: VersionRule = VersionRule.LATEST
    value: int = 0


class OnRefresh(StrEnum):
    """What happens to a sample in flight when new weights come."""

    WAIT = "wait"
    """It ends under the old ones first."""
    ABORT = "abort"
    """It stops, and goes on under the new ones behind the tokens it has, where that is exact; else from zero."""
    KEEP = "keep"
    """It is held while they are applied and goes on under them, its KV recomputed; spans record the seam."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters under vLLM's names and defaults; `max_tokens` has none on purpose.

    `seed` is the group's seed (each sample derives its own, `ids.sample_seed`); None = unseeded.
    `logprobs` is the number of top alternatives to return beside the sampled token's own,
    `prompt_logprobs` the same for each prompt token (None = none).  `max_tokens` 0 samples nothing:
    only prompt logprobs were asked for.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: dict[str, float] = {}
    logprobs: int = 0
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_output: dict[str, Any] | None = None


class ParsingSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the sampler parses generated text (parsers by vLLM's names).

    `tool_choice` is auto, required, or the name of the one function to call; `template_kwargs` are
    the chat template's variables, which some reasoning parsers read.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | None = None
    template_kwargs: dict[str, Any] = {}


class Session(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The turn of a multi-turn episode that this job generates.

    `turn` counts generations of the session from 0, over all its branches; `fence` is the RG_JOBS sequence of the
    turn's first dispatch (0 = this message's own sequence); `worker` is whose lane it was sent to.
    """

    session: str
    turn: int = 0
    node: TurnNode = TurnNode()
    fence: int = 0
    worker: str | None = None


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of one sample were computed by checkpoint `version`."""

    version: int
    start: int
    end: int


class Resume(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Tokens already delivered for one sample; generation continues exactly behind them."""

    index: int
    token_ids: TokenIds = TokenIds()
    logprobs: Floats = Floats()
    spans: tuple[VersionSpan, ...] = ()


class Reply(StrEnum):
    """What the sampler sends to `rg.reply.<group>` while and after it works."""

    NONE = "none"
    RESULT = "result"
    STREAM = "stream"


class SampleGroup(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="sample_group"):
    """Command: sample `indexes` of one group.  ingest → samplers, and the ledger (which retains it).

    A group of `n` samples may be split into `shards` jobs; each names its own `indexes`.
    Times are UNIX seconds.  `task` is the caller's payload for scorers (answer, dataset, entry);
    `metadata` is returned untouched.  `record_format` is the form in which the group's close is
    stored (`codec` content type without its prefix: msgpack or json).  `on_refresh` None leaves it
    to the worker; `pinned`: one version makes the whole group.
    """

    tenant: str
    run: str
    batch_id: str
    group_id: str
    position: int = 0
    n: int
    indexes: tuple[int, ...]
    shard: int = 0
    shards: int = 1
    policy: str
    model: str = ""
    pool: str
    prompt_token_ids: TokenIds
    prompt_text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    sampling: SamplingParams
    weights: WeightConstraint = WeightConstraint()
    on_refresh: OnRefresh | None = None
    pinned: bool = False
    resume: tuple[Resume, ...] = ()
    attempt: int = 1
    cache_salt: str | None = None
    parsing: ParsingSpec | None = None
    session: Session | None = None
    scorers: tuple[ScorerSpec, ...] = ()
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    rights: Rights = Rights()
    engagement_id: str | None = None
    priority: Priority = Priority.NORMAL
    created_at: float
    deadline: float
    reply: Reply = Reply.NONE
    traceparent: str | None = None
    record_format: str = "msgpack"

    @property
    def call_id(self) -> str:
        """What replies, frames, cancels and suspects of this job go by: its group, of a session its turn."""
        return self.group_id if self.session is None else turn_call(self.session.session, self.session.turn)


def turn_call(session: str, turn: int) -> str:
    """The `call_id` of a session's turn: one subject token."""
    return f"{session}-t{turn}"


class OpenEpisode(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="open_episode"):
    """Command only the ledger consumes: a group of `n` sessions is open until each has ended.

    Copies of it (each session of the group may publish one) change nothing: the first counts.
    """

    tenant: str
    run: str
    batch_id: str
    group_id: str
    n: int
    policy: str
    sessions: tuple[str, ...] = ()
    scorers: tuple[ScorerSpec, ...] = ()
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    rights: Rights = Rights()
    engagement_id: str | None = None
    reasoning_history: str = "keep"
    created_at: float
    deadline: float
    traceparent: str | None = None
    label: str | None = None
    record_format: str = "msgpack"


Job = SampleGroup | OpenEpisode
