"""Publish a batch of rollouts with plain nats-py.  Accepted, durably, once the acknowledgement is printed.

    NATS_URL=nats://host:4222 NATS_USER=acme NATS_PASSWORD=… TENANT=acme python examples/queue_publish.py my-run step-1

The key makes it safe to publish again; it also names the batch, so a step published twice is sampled once.
"""

import asyncio
import json
import os
import sys

import nats


async def main(run: str, key: str) -> None:
    server = await nats.connect(
        os.environ["NATS_URL"], user=os.environ["NATS_USER"], password=os.environ["NATS_PASSWORD"]
    )
    batch = {"run": run, "n": 4, "sampling": {"max_tokens": 16}, "tasks": [{"prompt": "2+2="}, {"prompt": "3*3="}]}
    acknowledged = await server.jetstream().publish(
        f"rg.0.submit.{os.environ['TENANT']}", json.dumps(batch).encode(), headers={"Idempotency-Key": key}
    )
    print(json.dumps({"stream": acknowledged.stream, "sequence": acknowledged.seq}))
    await server.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
