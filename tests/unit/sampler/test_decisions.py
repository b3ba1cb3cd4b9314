"""Small pure decisions of the sampler: constraints, staleness, lanes, folders, settings, checks."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts import topology
from rollgrid_contracts.checkpoints import PolicyState, staleness
from rollgrid_contracts.jobs import Priority, SamplingParams, VersionRule, VersionSpan, WeightConstraint
from rollgrid_contracts.samples import FinishReason
from rollgrid_contracts.subjects import PoolLane
from rollgrid_sampler import lifeline
from rollgrid_sampler.admission import judge
from rollgrid_sampler.desired import met
from rollgrid_sampler.engines.base import Generated, RequestFailed
from rollgrid_sampler.lanes import parse_durable
from rollgrid_sampler.resume import allowed
from rollgrid_sampler.settings import EngineKind, Fault, SamplerSettings

from tests.support.policies import policy_state


def policy(desired: int, history: tuple[int, ...]) -> PolicyState:
    return policy_state(desired=desired, history=history)


@pytest.mark.parametrize(
    ("rule", "value", "loaded", "expected"),
    [
        (VersionRule.LATEST, 0, 3, True),
        (VersionRule.EXACT, 3, 3, True),
        (VersionRule.EXACT, 2, 3, False),
        (VersionRule.MIN, 3, 3, True),
        (VersionRule.MIN, 4, 3, False),
        (VersionRule.MAX_STALENESS, 0, 7, True),
        (VersionRule.MAX_STALENESS, 0, 3, False),
        (VersionRule.MAX_STALENESS, 1, 3, True),
        (VersionRule.MAX_STALENESS, 1, 1, False),
        (VersionRule.MAX_STALENESS, 2, 1, True),
    ],
)
def test_version_constraints(rule: VersionRule, value: int, loaded: int, expected: bool) -> None:
    """Staleness counts positions in the desired history (1, 3, 7), not version numbers."""
    assert met(WeightConstraint(rule=rule, value=value), loaded, policy(7, (1, 3, 7))) is expected


def test_staleness_of_unknown_versions_and_after_a_rollback() -> None:
    assert staleness(policy(7, (1, 3, 7)), -1) == 3, "a version never desired is as stale as can be"
    assert staleness(policy(3, (1, 3, 7, 3)), 7) == 1, "what was gone back from is one behind"
    assert met(WeightConstraint(rule=VersionRule.MAX_STALENESS), 0, None), "nothing is known that it could be behind"


def test_spans_must_keep_a_constraint_that_names_versions() -> None:
    spans = (VersionSpan(version=3, start=0, end=4), VersionSpan(version=4, start=4, end=9))
    assert not allowed(WeightConstraint(rule=VersionRule.EXACT, value=3), spans)
    assert allowed(WeightConstraint(rule=VersionRule.MIN, value=3), spans)
    assert not allowed(WeightConstraint(rule=VersionRule.MIN, value=4), spans)
    assert allowed(WeightConstraint(), spans)


def test_durables_name_their_lanes() -> None:
    lane = PoolLane("pabc", Priority.BULK, "acme-1")
    assert parse_durable("pabc", topology.pool_consumer(lane).durable) == lane
    for other in ("ledger-3", "pool_other_bulk_acme", "pool_pabc_urgent_acme", "pool_pabc_bulk_", "lane_w1"):
        assert parse_durable("pabc", other) is None


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_SAMPLER_ENGINE", "scripted")
    monkeypatch.setenv("ROLLGRID_SAMPLER_MODEL", "/models/tiny")
    monkeypatch.setenv("ROLLGRID_SAMPLER_SCRIPTED_FAULTS", json.dumps({"666": "crash"}))
    found = SamplerSettings()
    assert found.engine is EngineKind.SCRIPTED
    assert found.model == Path("/models/tiny")
    assert found.scripted_faults == {666: Fault.CRASH}


def test_other_users_of_vllm_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is loaded by every vLLM process of the environment; only a sampler's children are bound."""
    monkeypatch.delenv(lifeline.OWNER, raising=False)
    assert bound_signal() == bound_signal_after(lifeline.bind_to_parent)
    monkeypatch.setenv(lifeline.OWNER, str(os.getpid()))
    assert bound_signal() == bound_signal_after(lifeline.bind_to_parent)


def bound_signal() -> int:
    import ctypes

    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)
    return found.value


def bound_signal_after(action: Any) -> int:
    action()
    return bound_signal()


@pytest.mark.parametrize(
    ("bound", "tokens", "code"),
    [
        ({"grammar": "root ::= "}, [], "invalid_request"),
        ({"regex": "a"}, [1], "engine_error"),
        (None, [], "engine_error"),
    ],
    ids=["does not compile", "fails while it samples", "no grammar"],
)
def test_a_grammar_that_does_not_compile_is_the_callers_mistake(
    bound: dict[str, Any] | None, tokens: list[int], code: str
) -> None:
    """vLLM ends both with `error`; only what never sampled a token can be the grammar."""
    ended = Generated(
        token_ids=tokens, logprobs=array("f", [0.0] * len(tokens)), finish_reason=FinishReason.ERROR, text=""
    )
    with pytest.raises(RequestFailed) as told:
        judge(ended, SamplingParams(max_tokens=4, structured_output=bound))
    assert told.value.code == code
    assert told.value.field == ("structured_output" if code == "invalid_request" else None)
