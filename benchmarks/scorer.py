"""How many samples a second one scorer judges: in its pool alone, and from RG_SAMPLES to RG_SAMPLES.

    python -m benchmarks.scorer [--events 1000] [--samples 8]

The second figure includes real NATS with an fsync for every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from rollgrid_contracts import ids, subjects, topology
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import ScorerKind, ScorerSpec
from rollgrid_runtime.bus import Bus, Outgoing
from rollgrid_runtime.provision import ensure_consumer, provision
from rollgrid_scorer.calls import Item, Shared
from rollgrid_scorer.isolation import Pool

from tests.support.servers import nats_server, new_bucket, seaweed_server
from tests.support.services import run_service

DURABLE = topology.scorer_consumer(ScorerKind.VERIFIER)
TEXT = "Let me think about it step by step. " * 20


async def pool_alone(type_: str, answer: str, events: int, samples: int) -> float:
    """Samples a second through worker processes, without NATS."""
    pool = Pool(2)
    await pool.start()
    shared = Shared(None, None, {"answer": answer}, {})
    items = [Item(index, TEXT + answer, None, "stop", 256, index) for index in range(samples)]
    slots = asyncio.Semaphore(64)

    async def event() -> None:
        async with slots:
            await pool.judge(type_, {}, shared, items, 10.0)

    await event()
    began = time.perf_counter()
    await asyncio.gather(*(event() for _ in range(events)))
    took = time.perf_counter() - began
    await pool.close()
    return events * samples / took


async def through_nats(events: int, samples: int) -> float:
    """Samples a second of `python -m rollgrid_scorer`, once everything waits in the stream."""
    bucket = new_bucket()
    with (
        nats_server() as nats,
        seaweed_server() as s3,
        run_service("scorer", {**nats.env(), **s3.env(bucket)}) as scorer,
    ):
        bus = await Bus.connect(nats.settings(), "bench")
        await provision(bus)
        await ensure_consumer(bus, DURABLE)
        scorer.pause()
        for start in range(0, events, 500):
            batch = [Outgoing(subjects.samples(ScorerKind.VERIFIER, "acme"), finished(samples), {})] * min(
                500, events - start
            )
            await bus.publish_batch(batch)
        scorer.resume()
        began = time.perf_counter()
        while True:
            info = await bus.consumer_info(DURABLE.stream, DURABLE.durable)
            if info is not None and info.num_pending == 0 and info.num_ack_pending == 0:
                break
            await asyncio.sleep(0.02)
        took = time.perf_counter() - began
        await bus.close()
    return events * samples / took


def finished(samples: int) -> SamplesFinished:
    """A group's finish of 256 tokens a sample."""
    tokens, logprobs = TokenIds.of(range(256)), Floats.of([-0.5] * 256)
    return SamplesFinished(
        tenant="acme",
        run="bench",
        batch_id="b",
        group_id=ids.group_id("acme", "bench", "k", 0),
        n=samples,
        policy="m",
        job_seq=1,
        samples=tuple(
            Sample(
                index=index,
                status=SampleStatus.SUCCEEDED,
                token_ids=tokens,
                logprobs=logprobs,
                text=TEXT + "42",
                finish_reason=FinishReason.STOP,
            )
            for index in range(samples)
        ),
        scoring=ScoringTask(scorers=(ScorerSpec(name="exact", type="exact_match"),), task={"answer": "42"}),
    )


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--events", type=int, default=1000)
    options.add_argument("--samples", type=int, default=8)
    given = options.parse_args()
    for type_ in ("exact_match", "numeric"):
        print(f"{type_:12} pool alone  {await pool_alone(type_, '42', given.events, given.samples):10,.0f} samples/s")
    print(f"{'exact_match':12} with NATS   {await through_nats(given.events, given.samples):10,.0f} samples/s")


if __name__ == "__main__":
    asyncio.run(main())
