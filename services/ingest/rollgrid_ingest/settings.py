"""Settings of ingest, from the environment (`ROLLGRID_INGEST_…`).  Sizes in bytes, times in seconds."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rollgrid_runtime.settings import ServiceSettings

MIB = 1024 * 1024


class Limits(ServiceSettings):
    """Bounds on what one request may ask for; every refusal names the one it broke."""

    model_config = SettingsConfigDict(env_prefix="ROLLGRID_INGEST_", extra="ignore")

    max_body_bytes: int = Field(default=8 * MIB, ge=1024)
    max_n: int = Field(default=1024, ge=1, description="samples of one group")
    max_groups: int = Field(default=4096, ge=1, description="tasks or prompts of one request")
    max_samples: int = Field(default=65536, ge=1, description="samples of one request")
    max_output_tokens: int | None = Field(default=None, ge=1, description="bound of max_tokens; None = the context")
    max_logprobs: int = Field(default=20, ge=0)
    max_stop: int = Field(default=16, ge=0)
    max_stop_chars: int = Field(default=1024, ge=1)
    max_stop_token_ids: int = Field(default=256, ge=0)
    max_bad_words: int = Field(default=256, ge=0)
    max_allowed_token_ids: int = Field(default=4096, ge=0)
    max_logit_bias: int = Field(default=1024, ge=0)
    max_rewards: int = Field(default=65536, ge=1, description="rewards posted in one request")
    max_detail_chars: int = Field(default=4096, ge=1, description="detail of a posted reward, a fork, an end")
    max_scorers: int = Field(default=16, ge=0)
    max_scorer_timeout_s: float = Field(default=600.0, gt=0)
    max_messages: int = Field(default=2048, ge=1)
    max_depth: int = Field(default=32, ge=1, description="nesting of task, metadata, messages and params")
    max_tools: int = Field(default=128, ge=0, description="tools of one request")
    max_structured_bytes: int = Field(default=64 * 1024, ge=1, description="a schema, grammar or the tools, as JSON")
    max_shard: int = Field(default=64, ge=1, description="samples one job carries; larger groups are split")
    interactive_deadline_s: float = Field(default=600.0, gt=0)
    batch_deadline_s: float = Field(default=24 * 3600.0, gt=0)
    max_deadline_s: float = Field(default=7 * 24 * 3600.0, gt=0)
    scorers: tuple[str, ...] = (
        "exact_match", "format", "json_schema", "length", "math", "multiple_choice", "numeric", "reasoning_gym", "regex",
    )  # fmt: skip
    max_inflight_samples: int | None = Field(default=None, ge=1, description="of one tenant; None = unbounded")


class IngestSettings(Limits):
    """`keys_file` names the API keys; without it only a loopback `host` is served, as tenant "local"."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    keys_file: Path | None = None
    cache_dir: Path | None = Field(default=None, description="tokenizers are kept here; None = a temporary folder")
    render_threads: int = Field(default=2, ge=1)
    tenant_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="part of what is shared (requests, bytes, readers, queue) one tenant may hold",
    )
    max_inflight_requests: int = Field(default=1024, ge=1, description="requests held at once, long polls apart")
    max_inflight_bytes: int = Field(default=256 * MIB, ge=MIB, description="request bodies held at once")
    body_timeout_s: float = Field(default=60.0, gt=0, description="for a whole body; of an upload, for each piece")
    max_readers: int = Field(default=1024, ge=1, description="long polls and event streams held at once")
    max_page: int = Field(default=512, ge=1, description="records of one page")
    max_wait_s: float = Field(default=60.0, ge=0, description="longest long poll")
    keep_alive_s: float = Field(default=15.0, gt=0, description="comment on an idle event stream")
    stream_stall_s: float = Field(default=60.0, gt=0, description="a client that takes nothing for so long is gone")
    stream_backlog_tokens: int = Field(
        default=8192, ge=1, description="tokens of one call waiting for a slow client; the rest comes from the record"
    )
    publish_timeout_s: float = Field(default=20.0, gt=0)
    queue_door: bool = Field(default=True, description="take submissions from RG_SUBMIT")
    queue_tenants: tuple[str, ...] = Field(
        default=("local",), description="tenants that may submit there, beside those of the keys file"
    )
    queue_concurrency: int = Field(default=8, ge=1, description="submissions of RG_SUBMIT handled at once")
    queue_per_tenant: int = Field(default=4, ge=1, description="of one tenant, waiting ones included")
    queue_unknown_grace_s: float = Field(
        default=30.0, ge=0, description="a submission to a subject of no tenant waits so long: a new key takes a moment"
    )
    reply_poll_s: float = Field(default=2.0, gt=0, description="how often the ledger is asked for a missing reply")
    reply_grace_s: float = Field(default=10.0, ge=0, description="wait for the ledger's verdict after a deadline")
    max_upload_bytes: int = Field(default=64 * 1024 * MIB, ge=1, description="one file of a checkpoint version")
    upload_ttl_s: float = Field(default=6 * 3600.0, gt=0, description="an upload that is not committed by then is gone")
    affinity_factor: float = Field(
        default=1.25, ge=1, description="a worker is bound at most so many times its share of the sessions"
    )
    affinity_saturation: float = Field(
        default=1.0, gt=0, description="a worker where so many samples wait for each slot loses sessions to idle ones"
    )
    max_open_sessions: int = Field(default=4096, ge=1, description="sessions of one tenant that have not ended")
    session_max_turns: int = Field(default=1024, ge=1, description="of one session, over all its branches")
    session_max_tokens: int = Field(
        default=4 * MIB, ge=1, description="of one session's tree, shared prefixes counted once"
    )
    session_max_branches: int = Field(default=1024, ge=1, description="of one session, the main one included")
    session_cache_tokens: int = Field(
        default=4 * MIB, ge=0, description="tokens of sessions lately used, kept in this process (about 10 bytes each)"
    )
    session_rebuild_s: float = Field(default=10.0, gt=0, description="bound of one rebuild of a session, and its lock")
    session_rebuild_wait_s: float = Field(
        default=1.0, ge=0, description="how long a request waits for another's rebuild before it is refused"
    )
    session_sweep_s: float = Field(default=1.0, gt=0, description="how often sessions past their TTL are looked for")
    header_run: str = Field(default="interactive", description="run of OpenAI calls without an X-Rollgrid-Run header")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the door."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
