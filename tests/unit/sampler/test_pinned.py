"""Whether a version that a session is pinned to will ever be loaded again, as the policy's state tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, Rollout
from rollgrid_sampler.desired import wanted
from rollgrid_sampler.pinned import lost

from tests.support.policies import policy_state


def adopted(version: int, base: int | None = None, **changes: Any) -> AdoptedVersion:
    kind = CheckpointKind.FULL if base is None else CheckpointKind.LORA
    return AdoptedVersion(version=version, kind=kind, base_version=base or 0, **changes)


STATE = policy_state(
    desired=5, newest=5, versions=(adopted(1), adopted(2, 1), adopted(3), adopted(4, 3), adopted(5, 3))
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (0, True),  # full weights that were replaced
        (1, True),
        (2, True),  # a LoRA version on them
        (3, False),  # the full weights that are wanted
        (4, False),  # a LoRA version that a pin would bring back
        (5, False),
        (6, False),  # published a moment ago: the state here is older
    ],
)
def test_what_was_replaced_is_lost_and_what_a_pin_brings_back_is_not(version: int, expected: bool) -> None:
    assert lost(version, wanted(STATE, "w", 1), STATE) is expected


def test_a_version_that_is_collected_is_lost_and_one_that_is_rolled_out_or_back_to_is_not() -> None:
    going = msgspec.structs.replace(STATE, versions=(*STATE.versions[:3], adopted(4, 3, going=True), adopted(5, 3)))
    assert lost(4, wanted(going, "w", 1), going)
    rollout = Rollout(version=3, previous=1, canary=1, workers=("canary",))
    canary = msgspec.structs.replace(STATE, desired=3, rollout=rollout)
    for worker in ("canary", "other"):
        assert [version for version in range(6) if lost(version, wanted(canary, worker, 1), canary)] == [0]
    assert not lost(1, wanted(STATE, "w", 1), None), "nobody says what is desired"
