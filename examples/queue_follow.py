"""Follow a tenant's trajectories with plain nats-py: one line per closed group, until COUNT have come.

    NATS_URL=nats://host:4222 NATS_USER=acme NATS_PASSWORD=… TENANT=acme python examples/queue_follow.py 2

The durable `tenant_<tenant>_default` is the cursor: the server sends what has not been acknowledged.
Batches published as JSON close as JSON (`record_format` chooses); see docs/reference/queue.md.
"""

import asyncio
import json
import os
import sys

import nats
from nats.errors import TimeoutError as Silence


async def main(count: int) -> None:
    server = await nats.connect(
        os.environ["NATS_URL"], user=os.environ["NATS_USER"], password=os.environ["NATS_PASSWORD"]
    )
    follower = await server.jetstream().pull_subscribe_bind(
        f"tenant_{os.environ['TENANT']}_default", stream="RG_TRAJECTORIES"
    )
    while count > 0:
        try:
            messages = await follower.fetch(16, timeout=5)
        except Silence:
            continue
        for message in messages:
            if (message.headers or {}).get("Content-Type") == "application/json" and not message.subject.endswith(
                ".rewards"
            ):
                group = json.loads(message.data)
                tokens = [entry["sample"].get("token_ids", []) for entry in group["entries"]]
                print(json.dumps({"run": group["run"], "group": group["group_id"], "tokens": tokens}), flush=True)
                count -= 1
            await message.ack()
    await server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
