"""Which scorers a request may ask for: known types, allowed webhooks, a formula that is the recorded one."""

from __future__ import annotations

from typing import Any

import pytest
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_ingest.rollout_schema import ScorerRequest
from rollgrid_ingest.scorers import Scorers, check_formula
from rollgrid_ingest.settings import IngestSettings
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.webhooks import AllowList

OFFERED = Scorers(
    {"numeric", "format"}, AllowList(["https://a.org/score", "https://b.org tenant=acme"]), IngestSettings()
)


def hook(**params: Any) -> ScorerRequest:
    return ScorerRequest(type="webhook", params=params, weight=0.5)


def refusal(*scorers: str | ScorerRequest, tenant: str = "acme") -> RollgridError:
    with pytest.raises(RollgridError) as caught:
        OFFERED.specs(scorers, "tasks[2].scorers", tenant)
    return caught.value


def test_verifiers_and_webhooks_get_their_kind() -> None:
    asked: list[str | ScorerRequest] = ["numeric", hook(url="https://a.org/score/x?y=1", extra={"k": 1})]
    numeric, webhook = OFFERED.specs(asked, "scorers", "acme")
    assert (numeric.kind, webhook.kind) == (ScorerKind.VERIFIER, ScorerKind.WEBHOOK)
    assert (webhook.name, webhook.type, webhook.weight) == ("webhook", "webhook", 0.5)
    assert webhook.params == {"url": "https://a.org/score/x?y=1", "extra": {"k": 1}}


@pytest.mark.parametrize(
    ("request_", "tenant", "field"),
    [
        (hook(url="https://a.org/other"), "acme", "params.url"),
        (hook(url="http://169.254.169.254/latest"), "acme", "params.url"),
        (hook(url="https://user:pw@a.org/score"), "acme", "params.url"),
        (hook(url="https://b.org/"), "other", "params.url"),
        (hook(url=7), "acme", "params.url"),
        (hook(), "acme", "params"),
        (hook(url="https://a.org/score", header="x"), "acme", "params"),
        (hook(url="https://a.org/score", token_ids="yes"), "acme", "params.token_ids"),
        (ScorerRequest(type="numeric", kind="webhook"), "acme", "kind"),
        (ScorerRequest(type="webhook", kind="judge", params={"url": "https://a.org/score"}), "acme", "kind"),
    ],
)
def test_a_refusal_names_the_field(request_: ScorerRequest, tenant: str, field: str) -> None:
    error = refusal(request_, tenant=tenant)
    assert error.field == f"tasks[2].scorers[0].{field}"
    assert error.http_status == 400
    assert "pw" not in error.message


def test_without_an_allow_list_there_is_no_webhook() -> None:
    offered = Scorers({"numeric"}, AllowList(), IngestSettings())
    with pytest.raises(RollgridError, match=r"not a known scorer \(numeric\)"):
        offered.specs([hook(url="https://a.org/score")], "scorers", "acme")


def test_gates_alone_are_refused() -> None:
    assert "empty" in refusal(ScorerRequest(type="numeric", gate=True)).message


def test_a_stated_formula_must_be_the_recorded_one() -> None:
    specs = OFFERED.specs(["numeric", ScorerRequest(type="format", gate=True)], "scorers", "acme")
    check_formula(None, specs, "tasks[0]")
    check_formula("(1*numeric) * gate(format)", specs, "tasks[0]")
    check_formula(" (1 * numeric)*gate( format )", specs, "tasks[0]")
    for other, scorers in (("1*numeric", specs), ("(1*numeric) * gate(format)", ())):
        with pytest.raises(RollgridError) as caught:
            check_formula(other, scorers, "tasks[0]")
        assert caught.value.field == "reward_formula"


def test_the_built_in_verifiers_are_offered() -> None:
    registry = pytest.importorskip("rollgrid_scorer.registry")
    assert set(IngestSettings().scorers) == set(registry.BUILT_IN)
