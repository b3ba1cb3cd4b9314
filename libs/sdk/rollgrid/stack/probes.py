"""A real operation on each server: what "ready" means.

The client libraries are those of the services, which a machine that runs a stack has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import urllib.error
import urllib.request
from typing import Any

import msgspec

PROBE_STREAM = "ROLLGRID_PROBE"
TIMEOUT_S = 5.0


class NatsAccess(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    user: str | None = None
    password: str | None = None


class S3Access(msgspec.Struct, frozen=True, kw_only=True):
    """`endpoint` None is AWS itself; credentials None are boto3's own search."""

    endpoint: str | None
    access_key: str | None = None
    secret_key: str | None = None
    bucket: str = "rollgrid"
    region: str = "us-east-1"


class ProbeFailed(Exception):
    """The server does not do its work (yet); the message says what was tried."""


async def nats(access: NatsAccess) -> str:
    """Publish to a file-backed stream and see the ack; the server's version."""
    import nats
    from nats.errors import Error
    from nats.js.api import DiscardPolicy, StreamConfig
    from nats.js.errors import APIError, NotFoundError

    async def silent(_: Exception) -> None:
        """The exception raised below says it."""

    options: dict[str, Any] = {"user": access.user, "password": access.password} if access.user else {}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            client = await nats.connect(
                access.url, name="rollgrid-probe", allow_reconnect=False, connect_timeout=2, error_cb=silent, **options
            )
            try:
                context = client.jetstream(timeout=3)
                try:
                    await context.publish("rollgrid.probe", b"1", stream=PROBE_STREAM)
                except (APIError, Error):
                    config = StreamConfig(
                        name=PROBE_STREAM, subjects=["rollgrid.probe"], max_msgs=1, max_bytes=65536,
                        discard=DiscardPolicy.OLD,
                    )  # fmt: skip
                    with contextlib.suppress(NotFoundError):
                        await context.add_stream(config)
                    await context.publish("rollgrid.probe", b"1", stream=PROBE_STREAM)
                v = client.connected_server_version
                return f"{v.major}.{v.minor}.{v.patch}"
            finally:
                await client.close()
    except (Error, OSError, TimeoutError, APIError) as error:
        raise ProbeFailed(f"JetStream publish: {error!r}") from error


async def redis(url: str) -> str:
    """SET, then GET the same value; the server's name and version."""
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client = Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.set("rg:probe:stack", b"1", ex=30)
            if await client.get("rg:probe:stack") != b"1":
                raise ProbeFailed("GET gave another value than was SET")
            facts = await client.info("server")
    except (RedisError, OSError, TimeoutError) as error:
        raise ProbeFailed(f"SET and GET: {error!r}") from error
    finally:
        await client.aclose()
    return str(facts.get("valkey_version") or facts.get("redis_version") or "")


async def s3(access: S3Access) -> str:
    """Make the bucket if there is none, PUT, then GET the same bytes."""
    return await asyncio.to_thread(_s3, access)


@functools.cache
def s3_client(access: S3Access) -> Any:
    """A boto3 client with short timeouts."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=access.endpoint,
        region_name=access.region,
        aws_access_key_id=access.access_key,
        aws_secret_access_key=access.secret_key,
        config=Config(
            connect_timeout=2, read_timeout=TIMEOUT_S, retries={"max_attempts": 1}, s3={"addressing_style": "path"}
        ),
    )


def _s3(access: S3Access) -> str:
    from botocore.exceptions import BotoCoreError, ClientError

    client, key = s3_client(access), "probes/stack"
    try:
        try:
            client.head_bucket(Bucket=access.bucket)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 404:
                raise
            client.create_bucket(Bucket=access.bucket)
        client.put_object(Bucket=access.bucket, Key=key, Body=b"1")
        answer = client.get_object(Bucket=access.bucket, Key=key)
        if answer["Body"].read() != b"1":
            raise ProbeFailed("GET gave other bytes than were PUT")
    except (BotoCoreError, ClientError, OSError) as error:
        raise ProbeFailed(f"PUT and GET: {error!r}") from error
    return str(answer["ResponseMetadata"].get("HTTPHeaders", {}).get("server", ""))


async def http_json(url: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON body; status 0 and the cause when nobody answers."""
    return await asyncio.to_thread(get_json, url, headers)


def get_json(url: str, headers: dict[str, str] | None = None, timeout_s: float = 6.0) -> tuple[int, dict[str, Any]]:
    """As `http_json`, blocking."""
    request = urllib.request.Request(url, headers=headers or {})  # noqa: S310 - our own services' doors
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return answer.status, _object(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _object(error.read())
    except (OSError, ValueError) as error:
        return 0, {"error": str(getattr(error, "reason", error))}


def _object(body: bytes) -> dict[str, Any]:
    found = json.loads(body or b"{}")
    return found if isinstance(found, dict) else {"body": found}
