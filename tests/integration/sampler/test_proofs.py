"""Samples wait for the first look at the version they end on, and learn what it found."""

from __future__ import annotations

import asyncio

import pytest
from rollgrid_contracts.checkpoints import Fingerprint, fingerprint_key
from rollgrid_contracts.topology import FINGERPRINTS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_sampler.fingerprints import Finding, Fingerprints, Proof
from rollgrid_sampler.proofs import Proofs, Quarantined


def proofs(bus: Bus) -> Proofs:
    found = Proofs(bus, Fingerprints(bus, "t", "p", "w1"), lambda: None)
    found.engine_class, found.recording = "c", True
    return found


@pytest.mark.parametrize("right", [True, False])
async def test_a_version_is_pending_until_it_was_looked_at(bus: Bus, right: bool) -> None:
    records: Table[Fingerprint] = Table(bus, FINGERPRINTS, Fingerprint)
    await records.create(fingerprint_key("t", "p", 2, "c"), Fingerprint(fingerprint="two", cold=True))
    subject = proofs(bus)
    await subject.look(Finding(1, "one", cold=True))
    subject.expect(2)
    waiting = asyncio.create_task(subject.settled([1, 2], 10))
    assert await subject.settled([1], 0.1), "others are not held up"
    with pytest.raises(TimeoutError):
        await subject.settled([2], 0.1)
    if right:
        await subject.look(Finding(2, "two", cold=False))
    else:
        with pytest.raises(Quarantined):
            await subject.look(Finding(2, "one", cold=False))
    assert await waiting is right
    assert subject.confirmed(2) is right
    subject.forget([1])
    assert subject.finding(2) is not None, "its samples may still end"


async def test_a_version_that_was_not_applied_holds_nobody_up(bus: Bus) -> None:
    subject = proofs(bus)
    subject.expect(2)
    waiting = asyncio.create_task(subject.settled([2], 10))
    await asyncio.sleep(0)
    subject.give_up(2)
    assert await waiting


async def test_of_two_first_findings_one_is_the_record_and_a_cold_one_replaces_it(bus: Bus) -> None:
    one, two = (Fingerprints(bus, "t", "p", worker) for worker in ("w1", "w2"))
    found = await asyncio.gather(
        one.prove(Finding(3, "x", cold=False), "c"), two.prove(Finding(3, "y", cold=False), "c")
    )
    assert sorted(found) == [Proof.PENDING, Proof.WRONG]
    assert await two.prove(Finding(3, "y", cold=True), "c") is Proof.CONFIRMED
    assert await one.prove(Finding(3, "x", cold=False), "c") is Proof.WRONG
    assert await one.prove(Finding(3, "x", cold=True), "c") is Proof.WRONG, "a cold record is not replaced"
    assert await one.prove(Finding(3, "x", cold=False), "other") is Proof.PENDING
    assert await one.prove(Finding(0, "x", cold=True, digest="a" * 64), "c") is Proof.CONFIRMED
    assert await one.prove(Finding(0, "y", cold=True, digest="b" * 64), "c") is Proof.CONFIRMED, "another base"
