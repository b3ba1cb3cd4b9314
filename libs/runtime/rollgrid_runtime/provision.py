"""Makes a NATS server match `rollgrid_contracts.topology`.  Idempotent; every service runs it at start."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import APIError, BucketNotFoundError
from rollgrid_contracts import topology
from rollgrid_contracts.topology import Bucket, Consumer, Stream

from .bus import Bus
from .errors import BusError

STREAM_NAME_IN_USE = 10058
_NANOSECONDS = 1_000_000_000


async def provision(bus: Bus) -> None:
    """Create or update all streams, buckets and fixed consumers; the ledger's first consumer before RG_JOBS is used.

    Raises BusError when the server refuses or does not answer.
    """
    for stream in topology.STREAMS:
        await ensure_stream(bus, stream)
    await _first_ledger_consumer(bus)
    for bucket in topology.BUCKETS:
        await ensure_bucket(bus, bucket)


async def ensure_stream(bus: Bus, stream: Stream) -> None:
    config: dict[str, Any] = {
        "name": stream.name,
        "subjects": list(stream.subjects),
        "retention": stream.retention.value,
        "storage": "file",
        "discard": "old" if stream.discard_old else "new",
        "max_bytes": _max_bytes(bus, stream),
        "max_msgs": -1,
        "max_msgs_per_subject": stream.max_msgs_per_subject,
        "discard_new_per_subject": stream.discard_new_per_subject,
        "max_age": 0,
        "max_msg_size": topology.MAX_PAYLOAD,
        "num_replicas": bus.settings.replicas,
        "duplicate_window": int(stream.duplicate_window_s * _NANOSECONDS),
        "allow_direct": True,
        "allow_atomic": True,
    }
    error = (await _api(bus, f"STREAM.CREATE.{stream.name}", config)).get("error")
    if error and int(error.get("err_code", 0)) == STREAM_NAME_IN_USE:
        error = (await _api(bus, f"STREAM.UPDATE.{stream.name}", config)).get("error")
    if error:
        raise BusError(f"stream {stream.name}: {error.get('description', error)}")


def _max_bytes(bus: Bus, stream: Stream) -> int:
    override = {
        topology.JOBS.name: bus.settings.jobs_max_bytes,
        topology.SAMPLES.name: bus.settings.samples_max_bytes,
        topology.TRAJECTORIES.name: bus.settings.trajectories_max_bytes,
    }.get(stream.name)
    return override if override is not None else stream.max_bytes


async def ensure_consumer(
    bus: Bus,
    consumer: Consumer,
    *,
    start_sequence: int | None = None,
    start_time: float | None = None,
    last_per_subject: bool = False,
    headers_only: bool = False,
    inactive_s: float | None = None,
) -> None:
    """Create the durable or leave it as it is; it starts at a stream sequence, or at a UNIX time, if given,
    or delivers the last message of each subject only.

    A durable that exists with other settings is updated (its position stays).  With `inactive_s`
    the server deletes it once nobody has read it for so long.
    """
    ack_wait = consumer.ack_wait_s if consumer.ack_wait_s is not None else bus.settings.ack_wait_s
    config: dict[str, Any] = {
        "durable_name": consumer.durable,
        "ack_policy": consumer.ack_policy.value,
        "deliver_policy": "all",
        "filter_subject": consumer.filter_subject,
        "ack_wait": int(ack_wait * _NANOSECONDS),
        "max_deliver": -1,
        "max_ack_pending": consumer.max_ack_pending,
        "replay_policy": "instant",
        "num_replicas": 0,
    }
    if start_sequence is not None:
        config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start_sequence)}
    elif start_time is not None:
        moment = datetime.fromtimestamp(start_time, UTC).isoformat()
        config |= {"deliver_policy": "by_start_time", "opt_start_time": moment}
    elif last_per_subject:
        config["deliver_policy"] = "last_per_subject"
    if inactive_s is not None:
        config["inactive_threshold"] = int(inactive_s * _NANOSECONDS)
    if headers_only:
        config["headers_only"] = True
    body = {"stream_name": consumer.stream, "config": config}
    error = (await _api(bus, f"CONSUMER.DURABLE.CREATE.{consumer.stream}.{consumer.durable}", body)).get("error")
    if error:
        raise BusError(f"consumer {consumer.stream}/{consumer.durable}: {error.get('description', error)}")


async def _first_ledger_consumer(bus: Bus) -> None:
    """RG_JOBS keeps only what somebody is interested in: without a ledger consumer a publish is
    acknowledged and dropped.  Once any ledger epoch exists, the ledger itself looks after it."""
    names = await bus.consumer_names(topology.JOBS.name)
    if not any(name.startswith("ledger-") for name in names):
        await ensure_consumer(bus, topology.ledger_consumer(0))


async def ensure_bucket(bus: Bus, bucket: Bucket) -> None:
    try:
        await bus.js.key_value(bucket.name)
    except BucketNotFoundError:
        config = KeyValueConfig(
            bucket=bucket.name,
            history=1,
            ttl=bucket.ttl_s or None,
            max_bytes=bucket.max_bytes,
            storage=StorageType.FILE,
            replicas=bus.settings.replicas,
        )
        try:
            await bus.js.create_key_value(config=config)
        except (APIError, TimeoutError) as error:
            raise BusError(f"bucket {bucket.name}: {error!r}") from error


async def _api(bus: Bus, call: str, body: dict[str, Any]) -> dict[str, Any]:
    for attempt in range(5):
        try:
            answer: dict[str, Any] = json.loads(await bus.request_raw(f"$JS.API.{call}", json.dumps(body).encode(), 5))
            return answer
        except BusError:
            if attempt == 4:
                raise
            await asyncio.sleep(0.2 * (attempt + 1))
    raise AssertionError("unreachable")
