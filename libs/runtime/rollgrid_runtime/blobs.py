"""S3 through boto3, in threads.  Writes that must happen once are conditional creates."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from rollgrid_contracts.samples import BlobRef

from .errors import PayloadGone, StorageError
from .settings import S3Settings

T = TypeVar("T")
PAYLOAD_PREFIX = "payloads/"


class StoredObject(NamedTuple):
    """`modified`: when it was written last, UNIX seconds by the clock of S3."""

    key: str
    size: int
    modified: float


class Blobs:
    """One bucket.  All methods raise StorageError when S3 does not answer or refuses."""

    def __init__(self, settings: S3Settings, threads: int = 8) -> None:
        self.settings = settings
        self.bucket = settings.bucket
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="s3")
        secret = settings.secret_key
        access = settings.access_key
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=settings.endpoint,
            region_name=settings.region,
            aws_access_key_id=access.get_secret_value() if access else None,
            aws_secret_access_key=secret.get_secret_value() if secret else None,
            config=Config(
                connect_timeout=3,
                read_timeout=settings.timeout_s,
                retries={"max_attempts": 3, "mode": "standard"},
                max_pool_connections=threads,
                s3={"addressing_style": "path"},
            ),
        )

    async def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except (BotoCoreError, ClientError) as error:
            raise StorageError(f"S3 {what}: {error}") from error

    async def ensure_bucket(self) -> None:
        """Create the bucket unless it is there; several services may do so at once."""

        def ensure() -> None:
            try:
                self._client.head_bucket(Bucket=self.bucket)
                return
            except ClientError as error:
                if _status(error) != 404:
                    raise
            try:
                self._client.create_bucket(Bucket=self.bucket)
            except ClientError as error:
                if error.response["Error"].get("Code") != "BucketAlreadyOwnedByYou":
                    raise

        await self._call(f"bucket {self.bucket}", ensure)

    async def put(self, key: str, data: bytes) -> None:
        await self._call(f"put {key}", lambda: self._client.put_object(Bucket=self.bucket, Key=key, Body=data))

    async def create(self, key: str, data: bytes) -> bool:
        """Write `key` unless it exists (`If-None-Match: *`); False when it does."""

        def create() -> bool:
            try:
                self._client.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*")
            except ClientError as error:
                if _status(error) in (409, 412):
                    return False
                raise
            return True

        return await self._call(f"create {key}", create)

    async def get(self, key: str) -> bytes | None:
        """The object's bytes, None when there is none."""

        def get() -> bytes | None:
            try:
                body: bytes = self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            except ClientError as error:
                if _status(error) == 404:
                    return None
                raise
            return body

        return await self._call(f"get {key}", get)

    async def upload(self, path: Path, key: str) -> None:
        """Upload a file (multipart when it is large)."""
        await self._call(f"upload {key}", lambda: self._client.upload_file(str(path), self.bucket, key))

    async def download(self, key: str, path: Path) -> None:
        """Download to `path`, appearing there whole or not at all."""

        def download() -> None:
            partial = path.with_name(path.name + ".partial")
            self._client.download_file(self.bucket, key, str(partial))
            partial.replace(path)

        await self._call(f"download {key}", download)

    async def copy(self, source: str, target: str) -> None:
        """Copy inside the bucket, on the server's side (in parts when it is large)."""
        origin = {"Bucket": self.bucket, "Key": source}
        await self._call(f"copy {source} to {target}", lambda: self._client.copy(origin, self.bucket, target))

    async def keys(self, prefix: str, after: str = "") -> list[str]:
        """All keys below `prefix` in lexical order, those greater than `after`."""

        def listing() -> list[str]:
            found: list[str] = []
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix, StartAfter=after
            )
            for page in pages:
                found += [item["Key"] for item in page.get("Contents", [])]
            return found

        return await self._call(f"list {prefix}", listing)

    async def objects(self, prefix: str) -> list[StoredObject]:
        """As `keys`, with size and age."""

        def listing() -> list[StoredObject]:
            found: list[StoredObject] = []
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            for page in pages:
                found += [
                    StoredObject(item["Key"], item["Size"], item["LastModified"].timestamp())
                    for item in page.get("Contents", [])
                ]
            return found

        return await self._call(f"list {prefix}", listing)

    async def delete(self, key: str) -> None:
        await self._call(f"delete {key}", lambda: self._client.delete_object(Bucket=self.bucket, Key=key))

    async def put_payload(self, data: bytes) -> BlobRef:
        """Store a payload under its digest and give its claim check."""
        digest = hashlib.sha256(data).hexdigest()
        key = PAYLOAD_PREFIX + digest
        await self.put(key, data)
        return BlobRef(key=key, sha256=digest, size=len(data))

    async def get_payload(self, ref: BlobRef) -> bytes:
        """The payload behind a claim check; raises PayloadGone when absent or altered."""
        data = await self.get(ref.key)
        if data is None:
            raise PayloadGone(f"payload {ref.key} is gone")
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise PayloadGone(f"payload {ref.key} does not match its digest")
        return data

    async def probe(self, service: str) -> None:
        """A real write and read; raises StorageError."""
        key = f"probes/{service}"
        await self.put(key, service.encode())
        if await self.get(key) != service.encode():
            raise StorageError("S3 probe read back other bytes")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
