"""Rows of a trainer's batch: equal neighbours are one group, failed samples are asked for again."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence

import msgspec
import pytest
from rollgrid import Client
from rollgrid.adapters.rows import RolloutsFailed, RowSampling
from rollgrid.errors import ConfigurationError
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.trajectories import Entry
from starlette.requests import Request
from starlette.responses import Response

from .build import closed, entry
from .faulty import FaultyIngest, running

VERSION = 7
Verdict = Callable[[int, int, int], Entry]
"""(batch from 0, group, index) → what became of the sample."""


class Fleet(FaultyIngest):
    """Closes every group as it is submitted; `verdict` says how its samples ended."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict
        self.asked: list[list[tuple[tuple[int, ...], int]]] = []

    async def submit(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        assert body["weights"] == {"exact_version": VERSION}
        batch, tasks = len(self.asked), [(tuple(task["prompt_token_ids"]), task["n"]) for task in body["tasks"]]
        self.asked.append(tasks)
        self.batch_size = len(tasks)
        self.groups = [
            (position + 1, closed(
                [self.verdict(batch, position, index) for index in range(n)],
                prompt=prompt, group_id=f"g{position}", position=position,
            ))
            for position, (prompt, n) in enumerate(tasks)
        ]  # fmt: skip
        return await super().submit(request)


def good(batch: int, group: int, index: int, version: int = VERSION) -> Entry:
    return entry(index, [batch, group, index], spans=[(version, 0, 3)])


def lost(index: int, *, retryable: bool) -> Entry:
    error = ErrorInfo(code=ErrorCode.ENGINE_ERROR, message="the engine died", retryable=retryable)
    return Entry(sample=Sample(index=index, status=SampleStatus.FAILED, error=error))


def sample(fleet: Fleet, prompts: Sequence[Sequence[int]], attempts: int = 3) -> list[list[int]]:
    with running(fleet) as server, Client(server.url) as client:
        rows = RowSampling(client, "p", "r", deadline_s=10.0, attempts=attempts)
        return [found.token_ids.tolist() for found in rows.sample(prompts, VERSION, {"max_tokens": 3})]


def test_equal_neighbours_are_one_group_and_every_row_gets_a_sample_of_its_own() -> None:
    fleet = Fleet(good)
    prompts = [[1, 2], [1, 2], [3], [1, 2], [1, 2], [1, 2]]
    assert sample(fleet, prompts) == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 2, 1], [0, 2, 2]]
    assert fleet.asked == [[((1, 2), 2), ((3,), 1), ((1, 2), 3)]]


def test_only_what_failed_is_asked_for_again() -> None:
    def verdict(batch: int, group: int, index: int) -> Entry:
        if batch == 0 and (group, index) in {(0, 1), (1, 0)}:
            return lost(index, retryable=True)
        if batch == 1 and group == 1:
            return good(batch, group, index, version=VERSION - 1)  # not what was asked for
        return good(batch, group, index)

    fleet = Fleet(verdict)
    assert sample(fleet, [[1], [1], [2], [2]]) == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 1]]
    assert fleet.asked == [[((1,), 2), ((2,), 2)], [((1,), 1), ((2,), 1)], [((2,), 1)]]


def test_an_empty_sample_is_a_missing_one() -> None:
    fleet = Fleet(lambda batch, group, index: entry(index, [], spans=[]))
    with pytest.raises(RolloutsFailed, match="2 of 2 samples are missing"):
        sample(fleet, [[1], [2]], attempts=2)
    assert len(fleet.asked) == 2


def test_a_failure_for_good_ends_it_at_once_and_says_why() -> None:
    fleet = Fleet(lambda batch, group, index: lost(index, retryable=False) if group else good(batch, group, index))
    with pytest.raises(RolloutsFailed, match="1 of 2 samples are missing: engine_error: the engine died") as caught:
        sample(fleet, [[1], [2]])
    assert (caught.value.missing, caught.value.rows, len(fleet.asked)) == (1, 2, 1)


def test_another_trl_than_it_drives_is_refused() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if "trl" in {distribution.name for distribution in importlib.metadata.distributions()}:
        pytest.skip("TRL is here; tests/clients runs it")
    from rollgrid.adapters.trl import FleetRollouts

    with Client("http://127.0.0.1:1") as client, pytest.raises(ConfigurationError, match=r"TRL 1\.16, here is none"):
        FleetRollouts(client, policy="p")
