"""What the trajectory logger counts; exposed on the health server's /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

EPOCH = Gauge("rollgrid_ledger_epoch", "Epoch of the active ledger; 0 = standing by")
OPEN_GROUPS = Gauge("rollgrid_ledger_open_groups", "Groups accepted and not closed")
CLOSED = Counter("rollgrid_ledger_closed_groups_total", "Groups closed by this process", ["reason"])
ENTRIES = Counter("rollgrid_ledger_entries_total", "Terminal entries written by this process", ["status"])
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
ARCHIVED_GROUPS = Counter("rollgrid_archive_groups_total", "Groups archived by this process")
ARCHIVED_POSTS = Counter("rollgrid_archive_posts_total", "Posts of rewards archived by this process")
ARCHIVED_BYTES = Counter("rollgrid_archive_bytes_total", "Parquet bytes written by this process")
ARCHIVE_ERRORS = Counter("rollgrid_archive_errors_total", "Failed attempts to write to S3")
PURGED = Counter("rollgrid_logger_purged_messages_total", "Messages purged", ["stream"])
