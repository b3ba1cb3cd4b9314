"""What the trajectory logger counts; exposed on the health server's /metrics."""

from __future__ import annotations

from collections import Counter as Count
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_contracts.trajectories import Entry, GroupClosed

EPOCH = Gauge("rollgrid_ledger_epoch", "Epoch of the active ledger; 0 = standing by")
OPEN_GROUPS = Gauge("rollgrid_ledger_open_groups", "Groups accepted and not closed")
CLOSED = Counter("rollgrid_ledger_closed_groups_total", "Groups closed by this process", ["reason"])
ENTRIES = Counter("rollgrid_ledger_entries_total", "Terminal entries written by this process", ["status"])
USEFUL = Counter(
    "rollgrid_ledger_useful_samples_total", "Entries that succeeded whole, with a valid reward where one was asked for"
)
REWARDS = Counter("rollgrid_ledger_rewards_total", "Entries of scored groups by what became of the reward", ["status"])
TOKENS = Counter("rollgrid_ledger_tokens_total", "Sampled tokens in terminal entries")
QUEUE_LAG = Histogram(
    "rollgrid_ledger_queue_lag_seconds",
    "From a group's acceptance to its close; groups of sessions last as long as their environments and are not in it",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
CLOSE_SECONDS = Histogram(
    "rollgrid_ledger_close_seconds",
    "From the decision to the durable close",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
CLOSES_PER_APPEND = Histogram(
    "rollgrid_ledger_closes_per_append", "Closes in one append", buckets=(1, 4, 8, 16, 64, 200)
)
CONFLICTS = Counter("rollgrid_ledger_conflicts_total", "Appends refused because another writer was first")
TAKE_OVERS = Counter("rollgrid_ledger_take_overs_total", "Times this process became the ledger")
SUPERSEDED = Counter("rollgrid_ledger_superseded_total", "Finishes and verdicts that came too late", ["why"])
UNREADABLE = Counter("rollgrid_logger_unreadable_total", "Messages that could not be decoded", ["stream"])
JOBS_MISMATCH = Gauge(
    "rollgrid_ledger_jobs_mismatch", "Jobs held by open groups against those the server has out to the ledger"
)
DOUBLE_CLOSES = Gauge("rollgrid_ledger_double_closes", "Groups found closed twice: must be 0")
ARCHIVED_TO = Gauge("rollgrid_archive_archived_to", "Last RG_TRAJECTORIES sequence behind a manifest")
ARCHIVE_LAG = Gauge("rollgrid_archive_lag", "Sequences stored and not yet archived")
ARCHIVE_AGE = Gauge("rollgrid_archive_oldest_seconds", "Since the oldest message that waits for its file was read")
ARCHIVED_GROUPS = Counter("rollgrid_archive_groups_total", "Groups archived by this process")
ARCHIVED_POSTS = Counter("rollgrid_archive_posts_total", "Posts of rewards archived by this process")
ARCHIVED_BYTES = Counter("rollgrid_archive_bytes_total", "Parquet bytes written by this process")
ARCHIVE_ERRORS = Counter("rollgrid_archive_errors_total", "Failed attempts to write to S3")
PURGED = Counter("rollgrid_logger_purged_messages_total", "Messages purged", ["stream"])


class Tally(NamedTuple):
    """What one closed group is worth to its trainer."""

    created_at: float
    useful: int
    tokens: int
    rewards: dict[str, int]
    played: bool = False
    """In sessions."""


def tally_of(closed: GroupClosed) -> Tally:
    asked = bool(closed.scorers)
    rewards: Count[str] = Count()
    for entry in closed.entries if asked else ():
        rewards[(entry.score_status or ScoreStatus.NOT_RUN).value] += 1
    useful = sum(_is_useful(entry, asked) for entry in closed.entries)
    played = closed.reasoning_history is not None
    return Tally(closed.created_at, useful, sum(map(_tokens, closed.entries)), dict(rewards), played)


def _is_useful(entry: Entry, asked: bool) -> bool:
    """Succeeded, a logprob for each token, a reward if one was asked for; staleness is the trainer's to judge."""
    if entry.sample.status is not SampleStatus.SUCCEEDED or (asked and entry.reward is None):
        return False
    return all(len(sample.token_ids) == len(sample.logprobs) for sample in (entry.sample, *entry.turns))


def _tokens(entry: Entry) -> int:
    return sum(len(sample.token_ids) for sample in entry.turns or (entry.sample,))


def count(tally: Tally, closed_at: float) -> None:
    USEFUL.inc(tally.useful)
    TOKENS.inc(tally.tokens)
    if not tally.played:
        QUEUE_LAG.observe(max(0.0, closed_at - tally.created_at))
    for status, number in tally.rewards.items():
        REWARDS.labels(status).inc(number)
