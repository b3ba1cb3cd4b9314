"""A43, I4: with two policies and three versions alive, every record keeps what its request asked of versions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from rollgrid import Client
from rollgrid.errors import VersionUnavailable
from rollgrid.results import Group
from rollgrid.weights_live import live_on
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.samples import SampleStatus

from tests.support.stack import POLICY, Stack
from tests.support.waiting import wait_until

from .conftest import SECOND, Trainer

PLAIN = {"max_tokens": 24}
ROUNDS = 3


class Load:
    """Batches of all constraints in turn, until told to stop; `live` is what ran everywhere before each was sent."""

    def __init__(self, client: Client, policy: str, live: int, *, exact: tuple[int, ...] = ()) -> None:
        self.client, self.policy, self.live, self.exact = client, policy, live, exact
        self.groups: list[tuple[dict[str, int], int, Group]] = []
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
        except BaseException as error:
            self._failed = error

    def _round(self) -> None:
        live = self.live
        asked = [{"min_version": live}, {"max_staleness": 0}, {"max_staleness": 1}, {}]
        asked += [{"exact_version": version} for version in self.exact]
        batches = [
            (weights, self.client.submit(
                ["a", "b"], n=3, sampling=PLAIN, run=f"load-{self.policy}", policy=self.policy,
                weights=weights or None, pin=len(weights) == 0, deadline_s=60,
            ))
            for weights in asked
        ]  # fmt: skip
        for weights, batch in batches:
            self.groups += [(weights, live, group) for group in batch.groups(timeout=90)]


def broken(weights: dict[str, int], live: int, group: Group) -> str | None:
    """What the group's record says against its request.  Versions are numbered one by one here."""
    if not all(sample.ok and len(sample) == 24 for sample in group):
        return f"lost samples: {[sample.error for sample in group]}"
    oldest, newest = min(group.versions), max(group.versions)
    for rule, value in weights.items():
        if rule == "exact_version" and group.versions != (value,):
            return f"{group.versions} instead of exactly {value}"
        if rule == "min_version" and oldest < value:
            return f"{oldest} is older than {value}"
        if rule == "max_staleness" and oldest < live - value:
            return f"{oldest} is more than {value} behind {live}, which ran everywhere when it was asked for"
    if not weights and oldest != newest:
        return f"a pinned group was made by {group.versions}"
    spans = [(span.start, span.end) for sample in group for span in sample.spans]
    return None if all(start < end for start, end in spans) else f"odd spans {spans}"


def test_constraints_are_honoured_under_load_while_versions_come(client: Client, trainer: Trainer) -> None:
    adapters = [trainer.adapter() for _ in range(3)]
    second = trainer.full()
    with (
        Load(client, POLICY, adapters[-1], exact=tuple(adapters[:2])) as loras,
        Load(client, SECOND, 0) as fulls,
    ):
        for _ in range(ROUNDS):
            before = (len(loras.groups), len(fulls.groups))
            second = trainer.full()
            loras.live = trainer.adapter()
            wait_for_live(client, SECOND, second)
            fulls.live = second
            more(loras, before[0] + 1)
            more(fulls, before[1] + 1)
    for load in (loras, fulls):
        assert len({version for _, _, group in load.groups for version in group.versions}) >= ROUNDS
        complaints = [why for found in load.groups if (why := broken(*found)) is not None]
        assert complaints == []
        for weights, _, group in load.groups:
            assert group.closed.weights.rule.value == next(iter(weights), "latest")
            for sample in group:
                assert (sample.oldest_version, sample.newest_version) == (min(sample.versions), max(sample.versions))
                assert sample.fingerprint is not None
                assert sample.staleness is not None
                assert group.staleness is not None
                assert 0 <= sample.staleness <= group.staleness


def more(load: Load, groups: int) -> None:
    wait_until(lambda: len(load.groups) >= groups or not load._thread.is_alive(), 60, "another batch")


def wait_for_live(client: Client, policy: str, version: int) -> None:
    wait_until(lambda: live_on(client.policy(policy), version), 60, f"{policy}@{version} live")


def test_policies_list_what_is_alive(client: Client, trainer: Trainer) -> None:
    newest = [trainer.adapter() for _ in range(3)][-1]
    policy = client.policy(POLICY)
    alive = {version.version: version for version in policy.versions if version.workers}
    assert {newest - 2, newest - 1, newest} <= set(alive)
    current = alive[newest]
    assert (current.kind, current.desired, current.staleness, current.workers, current.current_on) == (
        "lora", True, 0, 2, 2,
    )  # fmt: skip
    assert (current.step, current.kept) == (newest, True)
    assert current.committed_at > 0
    assert len(current.fingerprints) == 1  # both workers found the same
    assert alive[newest - 1].staleness == 1
    assert alive[newest - 1].current_on == 0
    assert alive[newest - 1].fingerprints != current.fingerprints
    assert alive[0].kind == "full"
    assert {found.policy for found in client.policies()} >= {POLICY, SECOND}


def test_a_version_not_there_yet_is_waited_for_and_then_said_to_be_unavailable(
    pipe: Stack, client: Client, trainer: Trainer
) -> None:
    """A19: published and not yet adopted is waited for; a version that does not come ends typed, to be tried again."""
    sync = pipe["checkpoint_sync"]
    asked: dict[str, Any] = {"n": 1, "sampling": PLAIN, "run": "waits", "policy": SECOND}
    sync.pause()
    try:
        version = trainer.full()
        late = client.submit(["a"], weights={"exact_version": version}, deadline_s=4, **asked)
        patient = client.submit(["b"], weights={"exact_version": version}, deadline_s=90, **asked)
        with pytest.raises(VersionUnavailable) as never:
            client.submit(["c"], weights={"exact_version": version + 1}, **asked)
        assert not never.value.retryable
        (group,) = late.groups(timeout=60)
        error = group.samples[0].error
        assert error is not None
        assert (error.code, error.retryable) == (ErrorCode.VERSION_UNAVAILABLE, True)
        assert group.samples[0].status in (SampleStatus.EXPIRED, SampleStatus.FAILED)
        assert (group.versions, group.staleness, group.samples[0].staleness) == ((), None, None)
    finally:
        sync.resume()
    (served,) = patient.groups(timeout=90)
    assert served.versions == (version,)


def test_a_full_version_that_nobody_runs_any_more_is_unavailable(client: Client, trainer: Trainer) -> None:
    """Nobody loads an old full version again: its files may be there, and then the job waits for a way back."""
    old = trainer.full()
    wait_for_live(client, SECOND, trainer.full())
    batch = client.submit(
        ["a"], n=1, sampling=PLAIN, run="old", policy=SECOND, weights={"exact_version": old}, deadline_s=4
    )
    (group,) = batch.groups(timeout=60)
    error = group.samples[0].error
    assert error is not None
    assert (error.code, error.retryable) == (ErrorCode.VERSION_UNAVAILABLE, True)
