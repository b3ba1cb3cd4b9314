"""Weights refreshed between and during turns: pin keeps its version while it is held, float moves on (A13, A48)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts.checkpoints import Pin, pin_key
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh, SampleGroup
from rollgrid_contracts.samples import Sample
from rollgrid_contracts.topology import PINS
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.kv import Table
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.service import SamplerService

from .frames import until
from .stage import Stage, sampler
from .test_loras import made_by, running, settled
from .turns import ended, exact, make_turn, session_of
from .versions import Versions, make_base

Play = Callable[..., Awaitable[list[Sample]]]
"""Submit turns and wait for them."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Two seconds a turn."""
    base = make_base(tmp_path / "base")
    return {"model": base, "cache": tmp_path / "cache", "policy_wait_s": 5.0, "scripted_token_rate": 100.0}


@pytest.fixture
def versions(stage: Stage, blobs: Blobs) -> Versions:
    return Versions(stage.bus, blobs)


@pytest.fixture
def play(stage: Stage) -> Play:
    async def played(*turns: SampleGroup) -> list[Sample]:
        for turn in turns:
            await stage.submit(turn)
        return await ended(stage, *turns)

    return played


def pinned(turn: int, version: int, **changes: Any) -> SampleGroup:
    return make_turn("pinned", turn, weights=exact(version), **changes)


def floating(turn: int, **changes: Any) -> SampleGroup:
    return make_turn("floating", turn, **changes)


async def hold(stage: Stage, turn: SampleGroup) -> str:
    """A pin as ingest writes it for a session; its key."""
    key = pin_key("shared", "default", turn.weights.value, session_of(turn).session)
    table: Table[Pin] = Table(stage.bus, PINS, Pin)
    await table.put(key, Pin(until=time.time() + 60, tenant="acme"))
    return key


def check_gone(sample: Sample) -> None:
    error = sample.error
    assert error is not None
    assert (error.code, error.field, error.retryable) == (ErrorCode.VERSION_GONE, "weights", False)


def check_true(versions: Versions, *played: tuple[SampleGroup, Sample, list[int]]) -> None:
    """Made by these versions, token by token."""
    for turn, sample, expected in played:
        assert made_by(sample) == expected, turn.call_id
        assert versions.lies(turn.group_id, [sample]) == []


async def test_a_swap_of_full_weights_waits_for_a_pinned_session_between_its_turns(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any], play: Play
) -> None:
    """While the pin is held, within the grace; then float is on the new version, and pin is told that it is gone."""
    await versions.full(1)
    await versions.desire(0)
    first, loose = pinned(0, 0), floating(0)
    key = await hold(stage, first)
    stranger = make_turn("stranger", 0, weights=exact(0))
    async with sampler(nats_settings, s3, pin_grace_s=30.0, **options) as one:
        for turn in (first, loose):
            await stage.submit(turn)
        await running(one, 2)
        await versions.desire(1)
        before = await ended(stage, first, loose)
        await until(lambda: _holds_back(one))
        second, looser = pinned(1, 0), floating(1)
        between = await play(second, looser)
        assert one._weights.current == 0
        await stage.submit(stranger)  # it may not begin on a version that goes
        pins: Table[Pin] = Table(stage.bus, PINS, Pin)
        await pins.delete(key)
        await settled(one, 1, set())
        late, loosest = pinned(2, 0), floating(2)
        gone, newest = await play(late, loosest)  # long before the deadline: it is not waited for
        (strange,) = await ended(stage, stranger)
    check_true(
        versions,
        *zip((first, loose, second, looser), (*before, *between), [[0]] * 4, strict=True),
        (loosest, newest, [1]),
    )
    check_gone(gone)
    check_gone(strange)


async def test_a_swap_of_full_weights_waits_for_the_pin_of_a_first_turn(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any], play: Play
) -> None:
    """A first turn says which version the session keeps, and its pin is written behind it; one that is left makes none."""
    await versions.full(1)
    await versions.desire(0)
    first, second, left = make_turn("pinned", 0, pinned=True), pinned(1, 0), make_turn("left", 0, pinned=True)
    async with sampler(nats_settings, s3, pin_grace_s=30.0, **options) as one:
        for turn in (first, left):
            await stage.submit(turn)
        await running(one, 2)
        await versions.desire(1)  # in the middle of the turns
        before, _ = await ended(stage, first, left)
        key = await hold(stage, second)
        await until(lambda: _holds_back(one))
        (between,) = await play(second)
        await Table(stage.bus, PINS, Pin).delete(key)
        await settled(one, 1, set())
        (gone,) = await play(pinned(2, 0))
    check_true(versions, (first, before, [0]), (second, between, [0]))
    check_gone(gone)


async def test_when_the_grace_is_over_full_weights_move_on_without_the_pinned_session(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any], play: Play
) -> None:
    """In mid-turn, by `keep`: float goes on under the new version behind what it has, the pinned turn ends typed."""
    await versions.full(1)
    await versions.desire(0)
    first, loose = pinned(0, 0), floating(0)
    await hold(stage, first)
    async with sampler(nats_settings, s3, pin_grace_s=0.2, swap_mode=OnRefresh.KEEP, **options) as one:
        for turn in (first, loose):
            await stage.submit(turn)
        await running(one, 2)
        await versions.desire(1)
        lost, across = await ended(stage, first, loose)
        late, loosest = pinned(1, 0), floating(1)
        gone, newest = await play(late, loosest)
    check_true(versions, (loose, across, [0, 1]), (loosest, newest, [1]))
    check_gone(lost)
    check_gone(gone)


async def test_lora_versions_stay_side_by_side_for_a_pinned_session(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any], play: Play
) -> None:
    for number in (1, 2, 3):
        await versions.lora(number)
    await versions.desire(1)
    first, loose = pinned(0, 1), floating(0, on_refresh=OnRefresh.KEEP)
    key = await hold(stage, first)
    async with sampler(nats_settings, s3, max_loras=2, pin_grace_s=0.2, **options) as one:
        for turn in (first, loose):
            await stage.submit(turn)
        await running(one, 2)
        await versions.desire(2)
        during = await ended(stage, first, loose)
        await versions.desire(3)  # there is room for two: the pinned one and the newest
        await settled(one, 3, {1, 3})
        second, looser = pinned(1, 1), floating(1)
        between = await play(second, looser)
        pins: Table[Pin] = Table(stage.bus, PINS, Pin)
        await pins.delete(key)
        await settled(one, 3, {2, 3})
        await versions.desire(3, versions=tuple(versions.adopted[number] for number in (2, 3)))  # 1 is collected
        await until(lambda: one._weights.lost(pinned(2, 1)))
        (gone,) = await play(pinned(2, 1))
    check_true(
        versions,
        *zip((first, loose), during, ([1], [1, 2]), strict=True),
        *zip((second, looser), between, ([1], [3]), strict=True),
    )
    check_gone(gone)


def _holds_back(one: SamplerService) -> bool:
    return one._weights._reconciler.holding_back
