"""What ingest counts; exposed on the health server's /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("rollgrid_ingest_requests_total", "Answered requests", ["route", "status"])
SECONDS = Histogram(
    "rollgrid_ingest_request_seconds",
    "From the first byte to the end of the answer",
    ["route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
GROUPS = Counter("rollgrid_ingest_groups_total", "Groups accepted", ["priority"])
SAMPLES = Counter("rollgrid_ingest_samples_total", "Samples accepted", ["priority"])
REFUSED = Counter("rollgrid_ingest_refused_total", "Requests refused", ["code"])
QUEUED = Counter("rollgrid_ingest_queue_messages_total", "Messages of the queue door by how they ended", ["outcome"])
"""`outcome`: accepted, refused (closed in its run), rejected (closed in the run _rejected), delayed."""
PACED = Counter("rollgrid_ingest_paced_total", "Submissions that found their run at the end of its capacity")
PACE_WAITING = Gauge("rollgrid_ingest_pace_waiting", "Submissions held back until their run has capacity")
CONSUMED_STALENESS = Histogram(
    "rollgrid_ingest_consumed_staleness",
    "Positions between the version desired when a closed group was read and the oldest that made any of its tokens",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
)
CONSUMED_LAG = Histogram(
    "rollgrid_ingest_consumed_lag_seconds",
    "From the commit of the newest version that made any token of a group to the reading of the group",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400),
)
RENDER_SECONDS = Histogram(
    "rollgrid_ingest_render_seconds",
    "Rendering the prompts of one request to token ids",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
STORE_SECONDS = Histogram(
    "rollgrid_ingest_store_seconds",
    "From a checked request to its jobs being durable",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20),
)
STREAMS = Gauge("rollgrid_ingest_streams_open", "Answers being streamed to their clients")
WAITING = Gauge("rollgrid_ingest_waiting_replies", "Interactive groups waiting for their samples")
REPLIES = Counter("rollgrid_ingest_replies_total", "Interactive groups answered", ["source"])
"""`source`: reply (core NATS) or record (read back through the ledger)."""
FRAMES_DROPPED = Counter("rollgrid_ingest_frames_dropped_total", "Token frames over a slow client's bound")
PLACED = Counter("rollgrid_ingest_turns_placed_total", "Turns by how their worker was found", ["how"])
"""`how`: kept, moved, new (bindings), hash (Redis away), pool (no ready worker)."""
REBINDS = Counter("rollgrid_ingest_sessions_moved_total", "Bindings of sessions broken", ["cause"])
BOUND = Gauge("rollgrid_ingest_sessions_bound", "Sessions bound to live workers")
BOUND_MOST = Gauge("rollgrid_ingest_sessions_bound_most", "Sessions bound to the worker that has most of them")
SESSIONS = Counter("rollgrid_ingest_sessions_total", "Sessions opened, and ended by how they ended", ["outcome"])
"""`outcome`: opened, closed, failed, expired."""
SESSIONS_OPEN = Gauge("rollgrid_ingest_sessions_open", "Sessions of the deployment that have not ended")
TURNS = Counter("rollgrid_ingest_turns_total", "Turns of sessions begun")
TURNS_REFUSED = Counter("rollgrid_ingest_turns_refused_total", "Turns that could not begin", ["code"])
REBUILDS = Counter("rollgrid_ingest_session_rebuilds_total", "Folds of sessions that Redis had lost", ["outcome"])
"""`outcome`: done, overtaken, waited (for another's, in vain), failed."""
SESSION_RACES = Counter(
    "rollgrid_ingest_session_races_total", "Transitions that found the fold changed and began again"
)
