"""NATS_URL, REDIS_URL and S3_ENDPOINT replace the servers of the stack."""

from __future__ import annotations

import pytest

from tests.integration.stack.stack_process import stack
from tests.support.servers import NatsServer, SeaweedServer, ValkeyServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_servers_named_in_the_environment_are_used(
    nats: NatsServer, valkey: ValkeyServer, s3_server: SeaweedServer
) -> None:
    addresses = {
        "NATS_URL": nats.url.replace("//", f"//{nats.user}:{nats.password}@"),
        "REDIS_URL": valkey.url,
        "S3_ENDPOINT": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    with stack(**addresses) as found:
        state = found.up()
        assert not {"nats", "valkey", "s3"} & set(state.pids)
        assert not (found.home / "data" / "nats").exists()
        shown = (found.home / "stack.json").read_text()
        assert nats.password not in shown
        assert valkey.password not in shown
        with found.client() as client:
            batch = client.submit(["hello"], n=2, policy="tiny", sampling={"max_tokens": 4})
            assert [group.counts for group in batch.groups(timeout=60)] == [{"succeeded": 2}]
        assert found.down().returncode == 0
