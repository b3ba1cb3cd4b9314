"""Settings of the trajectory logger, from the environment (`ROLLGRID_TRAJECTORY_LOGGER_…`)."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rollgrid_runtime.settings import ServiceSettings

MIB = 1024 * 1024


class TrajectoryLoggerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_TRAJECTORY_LOGGER_", extra="ignore")

    ledger: bool = Field(default=True, description="fold and close groups (one active ledger, others stand by)")
    archiver: bool = Field(default=True, description="write closed groups to S3 and purge what is archived")

    # the ledger
    fetch: int = Field(default=500, ge=1, description="messages asked for at once")
    close_batch: int = Field(default=200, ge=1, le=500, description="closes of one run in one append")
    close_batch_bytes: int = Field(default=16 * MIB, ge=1, description="bytes of closes in one append")
    close_linger_s: float = Field(default=0.01, ge=0, description="closes of batch jobs wait so long for company")
    close_backlog: int = Field(default=2000, ge=1, description="unwritten closes at which events are read no further")
    closed_kept: int = Field(default=2_000_000, ge=1000, description="closes remembered for 25 h, about 300 bytes each")
    refold_margin_s: float = Field(default=60.0, ge=0, description="clock error allowed between stream leaders")
    purge_every_s: float = Field(default=10.0, gt=0)
    purge_min_bytes: int = Field(default=4 * MIB, ge=0, description="purge RG_SAMPLES when that much is not needed")
    purge_between_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of RG_SAMPLES' bound above which events behind an open session's are purged, too",
    )
    purge_grace_s: float = Field(
        default=120.0, ge=0, description="events stay readable so long after their group closed"
    )
    watch_every_s: float = Field(default=60.0, gt=0, description="compare open groups with the stream's count")

    # the archiver
    archive_groups: int = Field(default=512, ge=1, description="groups in one Parquet object")
    archive_bytes: int = Field(default=32 * MIB, ge=1, description="bytes of bodies in one Parquet object")
    archive_age_s: float = Field(default=5.0, gt=0, description="a group waits at most so long for its object to fill")
    retain_s: float = Field(default=48 * 3600.0, gt=0, description="archived closes stay in the stream so long")
    retain_share: float = Field(
        default=0.7, gt=0, le=1, description="share of the stream's bound above which archived closes go earlier"
    )
    retain_step: int = Field(default=1000, ge=1, description="purge when so many more sequences may go")
    retain_every_s: float = Field(default=30.0, gt=0)
    superseded_every_s: float = Field(default=60.0, gt=0, description="write superseded finishes to S3")
