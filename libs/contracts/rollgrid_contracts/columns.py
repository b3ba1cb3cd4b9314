"""The archive: its columns, declared once, and the manifest that makes an object count.

One Parquet row is one sample of one closed group; rows of a group are adjacent, ordered by index,
groups by stream sequence.  The turns of sessions (a shared prefix once, whatever branches off it) and posted
rewards are datasets of their own under the same manifests.
Every storage's schema is rendered from here.

To add a column: declare it here and give it a value in `rollgrid_runtime.archive_rows`.  Old objects
lack it and stay readable: whatever no typed column holds travels in the two record columns.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from .subjects import PARTITION

ARCHIVE_SCHEMA = 2
"""Newest version of the layout, written into manifests; readers refuse newer ones.

1: no range with turns; 2: entries with turns have them in the `turns` object of their range.
"""

ARCHIVE_PREFIX = f"archive/{PARTITION}/"
MANIFEST_PREFIX = ARCHIVE_PREFIX + "manifests/"
DATA_PREFIX = ARCHIVE_PREFIX + "data/"
SUPERSEDED_PREFIX = ARCHIVE_PREFIX + "superseded/"
REWARDS_PREFIX = ARCHIVE_PREFIX + "rewards/"
TURNS_PREFIX = ARCHIVE_PREFIX + "turns/"


def manifest_key(first: int) -> str:
    """Key of the manifest whose range begins at sequence `first`; keys sort by sequence."""
    return f"{MANIFEST_PREFIX}{first:020d}.json"


def first_of_manifest(key: str) -> int:
    return int(key.removeprefix(MANIFEST_PREFIX).removesuffix(".json"))


def data_key(first: int, last: int, sha256: str) -> str:
    """Key of the object with the rows of [first, last].

    It names its content: rivals that write the same range never overwrite each other's bytes.
    """
    return f"{DATA_PREFIX}{first}-{last}-{sha256[:12]}.parquet"


def rewards_key(first: int, last: int, sha256: str) -> str:
    """As `data_key`, of the object with the rewards posted in [first, last]."""
    return f"{REWARDS_PREFIX}{first}-{last}-{sha256[:12]}.parquet"


def turns_key(first: int, last: int, sha256: str) -> str:
    """As `data_key`, of the object with the turns of the sessions that closed in [first, last]."""
    return f"{TURNS_PREFIX}{first}-{last}-{sha256[:12]}.parquet"


class Kind(StrEnum):
    """Storage type of a column; lists are one value per token, scorer or purpose."""

    TEXT = "text"
    CATEGORY = "category"
    INT = "int64"
    FLAG = "bool"
    SEQUENCE = "uint64"
    FLOAT = "float64"
    TOKENS = "list<uint32>"
    LOGPROBS = "list<float32>"
    NUMBERS = "list<float64>"
    TEXTS = "list<text>"
    INTS = "list<int64>"
    JSON = "json"
    BYTES = "binary"


class Column(NamedTuple):
    """`nullable` columns hold null where the value is absent; null is never 0 or an empty text."""

    name: str
    kind: Kind
    nullable: bool
    about: str


GROUP_COLUMNS = (
    Column("sequence", Kind.SEQUENCE, False, "RG_TRAJECTORIES sequence of the group's close: every reader's cursor"),
    Column("tenant", Kind.CATEGORY, False, "owner; readers must filter by it"),
    Column("run", Kind.CATEGORY, False, "training run"),
    Column("batch_id", Kind.CATEGORY, False, "client call"),
    Column("group_id", Kind.TEXT, False, "task"),
    Column("position", Kind.INT, False, "position of the task in its batch"),
    Column("n", Kind.INT, False, "samples of the group"),
    Column("policy", Kind.CATEGORY, False, "model lineage"),
    Column("model", Kind.CATEGORY, False, "model name as asked for"),
    Column("close_reason", Kind.CATEGORY, False, "complete, cancelled, expired or rejected"),
    Column("priority", Kind.CATEGORY, False, "interactive, normal or bulk"),
    Column("created_at", Kind.FLOAT, False, "UNIX seconds at which ingest made the job"),
    Column("closed_at", Kind.FLOAT, False, "UNIX seconds at which the ledger closed the group"),
    Column("deadline", Kind.FLOAT, False, "UNIX seconds; 0 = none"),
    Column("prompt_token_ids", Kind.TOKENS, False, "ids the engine was given"),
    Column("prompt_text", Kind.TEXT, True, "prompt as text, when the client sent text"),
    Column("messages", Kind.JSON, True, "chat messages, when the client sent them"),
    Column("sampling", Kind.JSON, True, "sampling parameters under vLLM's names"),
    Column("logprobs_mode", Kind.CATEGORY, False, "what the log-probabilities are of"),
    Column("reward_formula", Kind.CATEGORY, True, "how the reward follows from the scores"),
    Column("task", Kind.JSON, False, "the caller's payload for scorers"),
    Column("metadata", Kind.JSON, False, "the caller's own, returned untouched"),
    Column("purposes", Kind.TEXTS, False, "what the grant allows"),
    Column("grant_id", Kind.CATEGORY, True, "rights under which the record exists"),
    Column("engagement_id", Kind.CATEGORY, True, "engagement the record belongs to"),
    Column("weights_rule", Kind.CATEGORY, False, "which versions could serve: latest, exact_version, min_version, …"),
    Column("weights_value", Kind.INT, True, "that version, or positions of staleness"),
    Column("traceparent", Kind.TEXT, True, "trace of the request"),
)

SAMPLE_COLUMNS = (
    Column("index", Kind.INT, False, "index of the sample in its group"),
    Column("turns", Kind.INT, False, "turns of a session, which are rows of the turns dataset; 0 = single generation"),
    Column("attempt", Kind.INT, False, "which try won"),
    Column("status", Kind.CATEGORY, False, "succeeded, failed, cancelled or expired"),
    Column("finish_reason", Kind.CATEGORY, True, "why generation ended, as the engine said"),
    Column("token_ids", Kind.TOKENS, False, "sampled ids; EOS and stop tokens stay in"),
    Column("logprobs", Kind.LOGPROBS, False, "natural log-probability of each sampled id"),
    Column("text", Kind.TEXT, True, "the ids as text"),
    Column("span_versions", Kind.INTS, False, "checkpoint version of each span of tokens"),
    Column("span_ends", Kind.INTS, False, "end (exclusive) of each span; spans are adjacent from 0"),
    Column("oldest_version", Kind.INT, True, "oldest version that made any token, of any turn; null = no token"),
    Column("newest_version", Kind.INT, True, "newest version that made any token"),
    Column("staleness", Kind.INT, True, "desired versions by which the oldest was behind at the close; null = unknown"),
    Column("weight_fingerprint", Kind.CATEGORY, True, "digest of what the loaded weights really compute"),
    Column("fingerprint_confirmed", Kind.FLAG, False, "whether a cold load gave that fingerprint, too"),
    Column("seed", Kind.INT, True, "the sample's own seed"),
    Column("reward", Kind.FLOAT, True, "null unless every scorer asked for gave a number"),
    Column("score_status", Kind.CATEGORY, True, "why there is a reward or none; null = no scorer asked for"),
    Column("score_names", Kind.TEXTS, False, "scorers that answered"),
    Column("score_values", Kind.NUMBERS, False, "their values, null where they gave none"),
    Column("score_statuses", Kind.TEXTS, False, "their statuses"),
    Column("turn_values", Kind.JSON, True, "values per turn by scorer; null where no scorer gave any"),
    Column("engine", Kind.CATEGORY, False, "engine and build"),
    Column("worker", Kind.CATEGORY, False, "worker that generated it"),
    Column("started_at", Kind.FLOAT, False, "UNIX seconds; 0 = unknown"),
    Column("first_token_at", Kind.FLOAT, False, "UNIX seconds; 0 = unknown"),
    Column("finished_at", Kind.FLOAT, False, "UNIX seconds; 0 = unknown"),
    Column("error_code", Kind.CATEGORY, True, "stable code of the failure"),
    Column("error_message", Kind.TEXT, True, "its text"),
)

RECORD_COLUMNS = (
    Column("group_record", Kind.BYTES, True, "msgpack GroupClosed less the columns it is rebuilt from; first row only"),
    Column("entry_record", Kind.BYTES, False, "msgpack Entry less the columns it is rebuilt from"),
)

COLUMNS = GROUP_COLUMNS + SAMPLE_COLUMNS + RECORD_COLUMNS

REWARD_COLUMNS = (
    Column("sequence", Kind.SEQUENCE, False, "RG_TRAJECTORIES sequence of the post: a later one replaces an earlier"),
    Column("tenant", Kind.CATEGORY, False, "owner; readers must filter by it"),
    Column("run", Kind.CATEGORY, False, "training run"),
    Column("group_id", Kind.TEXT, False, "group the reward was posted onto"),
    Column("closed_sequence", Kind.SEQUENCE, False, "RG_TRAJECTORIES sequence of that group's close"),
    Column("index", Kind.INT, False, "index of the sample in its group"),
    Column("name", Kind.CATEGORY, False, "tells rewards of one sample apart"),
    Column("kind", Kind.CATEGORY, False, "what it is: scalar, pass_rate, judge, turns, or the caller's own word"),
    Column("value", Kind.FLOAT, True, "null when it is one per turn"),
    Column("turn_values", Kind.NUMBERS, False, "one per turn, null where there is no verdict"),
    Column("detail", Kind.TEXT, True, "the caller's remark"),
    Column("source", Kind.CATEGORY, False, "who says so"),
    Column("metadata", Kind.JSON, False, "the caller's own, returned untouched"),
    Column("posted_at", Kind.FLOAT, False, "UNIX seconds at which ingest took it"),
    Column("traceparent", Kind.TEXT, True, "trace of the request"),
    Column("post_record", Kind.BYTES, True, "msgpack RewardsPosted; first row of each post only"),
)
"""The rewards dataset: one row is one reward of one post; rows of a post are adjacent, in stream order."""


TURN_COLUMNS = (
    Column("sequence", Kind.SEQUENCE, False, "RG_TRAJECTORIES sequence of the group's close"),
    Column("tenant", Kind.CATEGORY, False, "owner; readers must filter by it"),
    Column("run", Kind.CATEGORY, False, "training run"),
    Column("group_id", Kind.TEXT, False, "task"),
    Column("policy", Kind.CATEGORY, False, "model lineage"),
    Column("purposes", Kind.TEXTS, False, "what the grant allows"),
    Column("grant_id", Kind.CATEGORY, True, "rights under which the record exists"),
    Column("index", Kind.INT, False, "index of the sample in its group"),
    Column("session", Kind.CATEGORY, True, "session that played the sample"),
    Column("turn", Kind.INT, False, "number of the generation, counted over the whole session"),
    Column("parent", Kind.INT, True, "turn behind whose tokens it goes on; null = the root"),
    Column("branch", Kind.CATEGORY, False, "name of its branch"),
    Column("fork", Kind.CATEGORY, True, "why it does not simply go on behind the last turn of its branch"),
    Column("fork_detail", Kind.TEXT, True, "more of that"),
    Column("attempt", Kind.INT, False, "which try won"),
    Column("status", Kind.CATEGORY, False, "succeeded; failed, cancelled or expired ones are here if they have tokens"),
    Column("finish_reason", Kind.CATEGORY, True, "why generation ended, as the engine said"),
    Column("observation_token_ids", Kind.TOKENS, False, "ids between the parent's last and this turn's first: mask 0"),
    Column("closing", Kind.INT, False, "how many of them end the parent's turn"),
    Column("token_ids", Kind.TOKENS, False, "sampled ids: mask 1"),
    Column("logprobs", Kind.LOGPROBS, False, "natural log-probability of each sampled id"),
    Column("text", Kind.TEXT, True, "the sampled ids as text"),
    Column("messages", Kind.JSON, False, "the messages that the caller added"),
    Column("tool_calls", Kind.JSON, False, "the calls that were parsed from the text"),
    Column("parse_status", Kind.CATEGORY, True, "ok, malformed or none; null = nothing was to be parsed"),
    Column("approvals", Kind.JSON, False, "what the caller says was approved before it"),
    Column("deliverables", Kind.JSON, False, "what the caller says came of it"),
    Column("span_versions", Kind.INTS, False, "checkpoint version of each span of tokens"),
    Column("span_ends", Kind.INTS, False, "end (exclusive) of each span; spans are adjacent from 0"),
    Column("reward", Kind.FLOAT, True, "the caller's own for this turn"),
    Column("turn_values", Kind.JSON, True, "what scorers said of this turn, by scorer; null where none said anything"),
    Column("weight_fingerprint", Kind.CATEGORY, True, "digest of what the loaded weights really compute"),
    Column("seed", Kind.INT, True, "the turn's own seed"),
    Column("worker", Kind.CATEGORY, False, "worker that generated it"),
    Column("cached_tokens", Kind.INT, False, "prompt tokens whose KV was there already"),
    Column("gap_s", Kind.FLOAT, False, "seconds since the parent ended"),
    Column("started_at", Kind.FLOAT, False, "UNIX seconds; 0 = unknown"),
    Column("first_token_at", Kind.FLOAT, False, "UNIX seconds; 0 = unknown"),
    Column("finished_at", Kind.FLOAT, False, "UNIX seconds; 0 = unknown"),
    Column("error_code", Kind.CATEGORY, True, "stable code of the failure"),
    Column("error_message", Kind.TEXT, True, "its text"),
    Column("turn_record", Kind.BYTES, False, "msgpack Sample less the columns it is rebuilt from"),
)
"""The turns dataset: one row is one turn of one session; rows of a sample are adjacent, in the order of `Entry.turns`.

The prompt of a turn is the observations and sampled ids of its ancestors from the root, then its own observation.
"""


class ArchivedClose(msgspec.Struct, frozen=True, kw_only=True):
    """One close of an archived range: `counts` as in the `Rg-Counts` header, `at` UNIX seconds."""

    sequence: int
    group_id: str
    batch_id: str
    tenant: str
    run: str
    counts: str
    at: float


class ArchivedPost(msgspec.Struct, frozen=True, kw_only=True):
    """One `RewardsPosted` of an archived range; `key` is the id under which a repeat of it is known."""

    sequence: int
    group_id: str
    tenant: str
    run: str
    key: str


class ArchivedRewards(msgspec.Struct, frozen=True, kw_only=True):
    """What was posted in an archived range: its object (one row per reward) and the posts in it."""

    key: str
    sha256: str
    size: int
    rows: int
    posts: tuple[ArchivedPost, ...]


class ArchivedTurns(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of the sessions that closed in an archived range: their object, one row per turn."""

    key: str
    sha256: str
    size: int
    rows: int


class ArchiveManifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`manifests/<first>.json`, written last by conditional create: it makes the object count.

    Ranges of successive manifests are adjacent: each begins behind the last of the one before.
    A sequence of the range that is in none of `closes`, `rewards.posts` and `unreadable` was no longer stored.
    `key` is None when the range holds no group, `rewards` when it holds no post, `turns` when no entry has any;
    `schema` is the lowest version that says all of it.
    """

    schema: int = 1
    first: int
    last: int
    groups: int
    rows: int
    key: str | None
    sha256: str = ""
    size: int = 0
    closes: tuple[ArchivedClose, ...]
    unreadable: tuple[int, ...] = ()
    tenants: tuple[str, ...] = ()
    last_at: float = 0.0
    created_at: float = 0.0
    writer: str = ""
    rewards: ArchivedRewards | None = None
    turns: ArchivedTurns | None = None
