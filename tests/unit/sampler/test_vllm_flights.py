"""The gate in front of vLLM, and what is known of each request behind it."""

from __future__ import annotations

import asyncio

import pytest
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionSpan
from rollgrid_sampler.engines.base import GenerationRequest
from rollgrid_sampler.engines.vllm_flights import Applied, Flight, Flights


def request(name: str = "r", mode: OnRefresh | None = None, salt: str | None = "tenant") -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        sample=name,
        index=0,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=8),
        cache_salt=salt,
        on_refresh=mode,
    )


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


def test_salts_differ_by_tenant_weights_and_adapter() -> None:
    """No two of these may share a prefix; a full version is not an adapter of the same number."""
    salts = [
        Applied(version, adapter).salt(own)
        for own in (None, "a", "b")
        for version in (1, 2, 12)
        for adapter in (None, 1, 2)
    ]
    assert len(set(salts)) == len(salts)


async def test_nobody_passes_a_shut_gate_and_the_salt_is_of_what_is_applied_then() -> None:
    flights, salts = Flights(), list[str]()
    applied = 0

    async def fly(number: int) -> None:
        await flights.gate()
        with flights.flight(request(f"r{number}"), Applied(applied, None)) as flight:
            salts.append(flight.salt)
            await asyncio.sleep(0)

    flying = [asyncio.create_task(fly(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert len(flights) == 0
    applied = 1
    flights.open()  # and shut again before anybody who waits has run
    flights.shut()
    applied = 2
    await asyncio.sleep(0)
    assert len(flights) == 0
    flights.open()
    await asyncio.gather(*flying)
    assert set(salts) == {"tenant|2"}


async def test_waiting_for_flights_ends_with_the_last_of_them_or_with_the_deadline() -> None:
    flights = Flights()

    def kept(flight: Flight) -> bool:
        return flight.mode(OnRefresh.WAIT) is OnRefresh.KEEP

    with flights.flight(request("kept", OnRefresh.KEEP), Applied(1, None)):
        with flights.flight(request("waits"), Applied(1, None)):
            assert not await flights.landed(lambda flight: not kept(flight), 0.01)
        assert await flights.landed(lambda flight: not kept(flight), 1)
        assert not await flights.landed(kept, 0.01)
    assert await flights.landed(kept, 1)


def test_spans_of_weights_that_it_never_ran_under_are_refused() -> None:
    flight = Flight(request(), Applied(1, None))
    with pytest.raises(ValueError, match="2"):
        flight.spans((span(1, 0, 4), span(2, 4, 9)))
    flight.versions.append(2)
    assert flight.spans((span(1, 0, 4), span(2, 4, 9))) == (span(1, 0, 4), span(2, 4, 9))


def test_an_adapters_tokens_bear_its_version() -> None:
    flight = Flight(request(), Applied(1, 7))
    assert flight.spans((span(1, 3, 9),)) == (span(7, 3, 9),)
    with pytest.raises(ValueError, match="2"):
        flight.spans((span(2, 3, 9),))
