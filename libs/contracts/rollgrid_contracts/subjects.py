"""Every subject of rollgrid, built and parsed.  The second token is the ledger partition."""

from __future__ import annotations

from typing import NamedTuple

from .ids import NO_SESSION
from .jobs import Priority
from .scoring import ScorerKind

PARTITION = "0"
SUBMIT_ALL = f"rg.{PARTITION}.submit.*"
JOBS_ALL = f"rg.{PARTITION}.jobs.>"
SAMPLES_ALL = f"rg.{PARTITION}.samples.>"
TRAJECTORIES_ALL = f"rg.{PARTITION}.trajectories.>"
CHECKPOINTS_ALL = f"rg.{PARTITION}.checkpoints.>"
AUDIT_ALL = f"rg.{PARTITION}.audit.>"
LEDGER_QUERY = "rg.ledger.query"
WORKERS_CONTROL = "rg.ctl.worker.*"
LANES_CONTROL = "rg.ctl.lanes"
EVERY_WORKER = "all"
REWARDS = "rewards"


class PoolLane(NamedTuple):
    """The lane a job waits in: one durable each, so that no tenant's flood starves another."""

    pool: str
    priority: Priority
    tenant: str


def submit(tenant: str) -> str:
    return f"rg.{PARTITION}.submit.{tenant}"


def jobs_pool(pool: str, priority: Priority, tenant: str) -> str:
    return f"rg.{PARTITION}.jobs.pool.{pool}.{priority.value}.{tenant}"


def jobs_of(tenant: str) -> str:
    """Filter: the sampling jobs of one tenant, whatever pool and priority."""
    return f"rg.{PARTITION}.jobs.pool.*.*.{tenant}"


def jobs_worker(worker: str) -> str:
    return f"rg.{PARTITION}.jobs.lane.{worker}"


def jobs_episode(tenant: str) -> str:
    """`OpenEpisode` jobs: under RG_JOBS, outside every pool, so only the ledger reads them."""
    return f"rg.{PARTITION}.jobs.episode.{tenant}"


def samples(todo: ScorerKind, tenant: str, session: str = NO_SESSION) -> str:
    return f"rg.{PARTITION}.samples.{todo.value}.{tenant}.{session}"


def samples_todo(todo: ScorerKind) -> str:
    return f"rg.{PARTITION}.samples.{todo.value}.>"


def samples_of(tenant: str, session: str) -> str:
    """Filter: the events of one session, whoever must act on them."""
    return f"rg.{PARTITION}.samples.*.{tenant}.{session}"


def trajectories(tenant: str, run: str) -> str:
    return f"rg.{PARTITION}.trajectories.{tenant}.{run}"


def run_rewards(tenant: str, run: str) -> str:
    """Rewards posted onto the run's closed groups (`RewardsPosted`)."""
    return f"rg.{PARTITION}.trajectories.{tenant}.{run}.{REWARDS}"


def is_rewards(subject: str) -> bool:
    """Whether a subject of RG_TRAJECTORIES carries posted rewards and not a close."""
    return subject.count(".") == 5 and subject.endswith(f".{REWARDS}")


def trajectories_of(tenant: str) -> str:
    """Filter: everything of one tenant, closes and posted rewards."""
    return f"rg.{PARTITION}.trajectories.{tenant}.>"


def closes_of(tenant: str) -> str:
    """Filter: the closes of one tenant, whatever run."""
    return f"rg.{PARTITION}.trajectories.{tenant}.*"


def checkpoints(tenant: str, policy: str) -> str:
    return f"rg.{PARTITION}.checkpoints.{tenant}.{policy}"


def audit(tenant: str) -> str:
    return f"rg.{PARTITION}.audit.{tenant}"


def worker_control(worker: str) -> str:
    return f"rg.ctl.worker.{worker}"


def reply(group: str) -> str:
    return f"rg.reply.{group}"


def resume(group: str) -> str:
    """Where a worker asks what was streamed of a group before it took over."""
    return f"rg.resume.{group}"


def tenant_of_submit(subject: str) -> str:
    """The tenant of a queue-door message: from the subject, never from the body."""
    return subject.split(".")[3]


def run_of_trajectory(subject: str) -> tuple[str, str]:
    """(tenant, run) of a trajectory subject."""
    tokens = subject.split(".")
    return tokens[3], tokens[4]
