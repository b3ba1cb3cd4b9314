"""Programs that a test runs inside a container, where S3 can be reached: `python - NAME < this file`.

Each prints one JSON value.  Needs the packages of the services, not this repository.
"""

import concurrent.futures
import hashlib
import json
import sys
from typing import Any

import boto3
from rollgrid_runtime.settings import S3Settings

PROBE, WRITERS = "tests/conditional", 24


def objects() -> dict[str, str]:
    """The digest of every object under its key."""
    s3, bucket = _client()
    found = {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for item in page.get("Contents", []):
            body = s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            found[item["Key"]] = hashlib.sha256(body).hexdigest()
    return found


def conditional() -> list[int]:
    """The statuses of concurrent creates of one key, sorted."""
    s3, bucket = _client()

    def create(number: int) -> int:
        try:
            answer = s3.put_object(Bucket=bucket, Key=PROBE, Body=str(number).encode(), IfNoneMatch="*")
        except s3.exceptions.ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        return int(answer["ResponseMetadata"]["HTTPStatusCode"])

    with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        return sorted(pool.map(create, range(WRITERS)))


def _client() -> tuple[Any, str]:
    settings = S3Settings()
    assert settings.access_key
    assert settings.secret_key
    s3 = boto3.client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=settings.access_key.get_secret_value(),
        aws_secret_access_key=settings.secret_key.get_secret_value(),
    )
    return s3, settings.bucket


if __name__ == "__main__":
    print(json.dumps({"objects": objects, "conditional": conditional}[sys.argv[1]]()))
