"""What checkpoint-sync counts; exposed on the health server's /metrics.

`policy` is a label: there are as many as the settings name.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram
from rollgrid_contracts.checkpoints import PolicyState

VERSIONS = Counter("rollgrid_checkpoint_sync_versions_total", "Published versions decided", ["policy", "outcome"])
DESIRED = Gauge("rollgrid_checkpoint_sync_desired_version", "Version the policy's workers should run", ["policy"])
NEWEST = Gauge("rollgrid_checkpoint_sync_newest_version", "Newest version adopted", ["policy"])
VERIFY_SECONDS = Histogram(
    "rollgrid_checkpoint_sync_verify_seconds",
    "Verification of one version, from the listing to the verdict",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
PUBLISH_LAG = Histogram(
    "rollgrid_checkpoint_sync_publish_lag_seconds",
    "From a version's commit to its being desired",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
FAILURES = Counter("rollgrid_checkpoint_sync_failures_total", "Rounds of a policy that failed", ["step"])
UNSETTLED = Gauge("rollgrid_checkpoint_sync_unsettled_policies", "Policies not registered or not reconciled")

KEPT = Gauge("rollgrid_checkpoint_sync_versions_kept", "Versions whose files are kept", ["policy"])
DELETED = Counter("rollgrid_checkpoint_sync_deleted_bytes_total", "Bytes deleted from object storage", ["policy"])
WORKERS = Gauge("rollgrid_checkpoint_sync_workers", "Workers of the policy's pool by what they run", ["policy", "runs"])
LIVE_LAG = Histogram(
    "rollgrid_checkpoint_sync_live_lag_seconds",
    "From a version's commit to its running on the last worker of the pool",
    buckets=(0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
OVERDUE = Gauge("rollgrid_checkpoint_sync_refresh_overdue", "1 while a promised version has not come", ["policy"])
DISAGREEING = Gauge(
    "rollgrid_checkpoint_sync_fingerprints_disagreeing", "Loaded versions that compute something else", ["policy"]
)
PENDING = Gauge(
    "rollgrid_checkpoint_sync_fingerprints_pending",
    "References of running versions not yet from a cold load",
    ["policy"],
)
ROLLOUTS = Counter("rollgrid_checkpoint_sync_rollouts_total", "Rollouts that ended", ["policy", "outcome"])


def state(key: str, policy: PolicyState) -> None:
    DESIRED.labels(key).set(policy.desired)
    NEWEST.labels(key).set(policy.newest)


def adopted(key: str, policy: PolicyState) -> None:
    """Of a policy whose newest version has just become desired."""
    state(key, policy)
    newest = policy.versions[-1]
    if newest.committed_at:
        PUBLISH_LAG.observe(max(0.0, newest.adopted_at - newest.committed_at))
