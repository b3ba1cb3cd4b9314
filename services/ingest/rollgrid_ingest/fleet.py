"""What runs where: workers, policies, queues."""

from __future__ import annotations

import time

import msgspec
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.fleet import LedgerLease, WorkerState
from rollgrid_contracts.topology import LEDGER, LEDGER_LEASE_KEY, STREAMS, WORKERS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table, Versioned
from rollgrid_runtime.reading import consumer_lags

from .catalog import SHARED
from .policy_answers import live_versions
from .rollout_schema import PolicyAnswer, QueueAnswer
from .wire import unsupported

FRESH_S = 0.25
"""Leases read so recently are not read again: clients poll for a version to go live."""


class Fleet:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._workers: Table[WorkerState] = Table(bus, WORKERS, WorkerState)
        self._leases: Table[LedgerLease] = Table(bus, LEDGER, LedgerLease)
        self._seen: list[WorkerState] = []
        self._seen_at = float("-inf")

    async def workers(self) -> list[WorkerState]:
        """Every worker with a live lease.  Raises BusError."""
        if time.monotonic() - self._seen_at > FRESH_S:
            listed = await self._workers.items()
            self._seen = [entry.value for _, entry in sorted(listed.items())]
            self._seen_at = time.monotonic()
        return self._seen

    async def check_takes_adapters(self, policy: PolicyState) -> None:
        """Raises unsupported where the policy's workers are there and none of them can load a LoRA version."""
        serving = [worker for worker in await self.workers() if worker.pool == policy.pool]
        if serving and not any(worker.max_loras for worker in serving):
            raise unsupported("kind", f"no worker of {policy.policy} takes LoRA versions (max_loras 0)")

    async def policy_answer(self, entry: Versioned[PolicyState], tenant: str) -> PolicyAnswer:
        """The policy and the workers of its pool; of what they have loaded, what `tenant` may know of."""
        state = entry.value
        workers = [
            msgspec.structs.replace(
                worker, loaded=tuple(version for version in worker.loaded if version.tenant in (tenant, SHARED))
            )
            for worker in await self.workers()
            if worker.pool == state.pool
        ]
        return PolicyAnswer(
            policy=state.policy,
            tenant=state.tenant,
            pool=state.pool,
            base=state.base,
            kind=state.kind.value,
            dtype=state.dtype,
            desired=state.desired,
            newest=state.newest,
            history=list(state.history),
            max_model_len=state.max_model_len,
            vocab_size=state.vocab_size,
            eos_token_ids=list(state.eos_token_ids),
            aliases=list(state.aliases),
            tokenizer_digest=state.tokenizer_digest,
            revision=entry.revision,
            workers=workers,
            rollout=state.rollout,
            newest_at=state.newest_at,
            refresh_due=state.refresh_due,
            versions=live_versions(state, workers),
        )

    async def queues(self) -> dict[str, QueueAnswer]:
        """Every stream with the lag of its durables.  Raises BusError."""
        found: dict[str, QueueAnswer] = {}
        for stream in STREAMS:
            info = await self._bus.stream_info(stream.name)
            lags = await consumer_lags(self._bus, stream.name)
            found[stream.name] = QueueAnswer(
                messages=info.state.messages,
                bytes=info.state.bytes,
                max_bytes=info.config.max_bytes or -1,
                first_seq=info.state.first_seq,
                last_seq=info.state.last_seq,
                consumers={name: {"pending": lag.pending, "unacked": lag.unacked} for name, lag in lags.items()},
            )
        return found

    async def ledger(self) -> dict[str, object]:
        """The ledger's lease, and how old it is in seconds; empty when there never was one."""
        lease = await self._leases.get(LEDGER_LEASE_KEY)
        if lease is None:
            return {}
        return {**msgspec.structs.asdict(lease.value), "age_s": round(time.time() - lease.value.renewed_at, 3)}
