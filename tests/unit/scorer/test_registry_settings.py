"""Names of verifiers, and the settings that add some."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from rollgrid_runtime.webhooks import AllowList
from rollgrid_scorer.registry import Registry, parse_reference
from rollgrid_scorer.rewards.base import ScoreInput, TaskError
from rollgrid_scorer.settings import ScorerSettings
from rollgrid_scorer.workers import clean_environment

OWN = "obedient=tests.support.verifiers:Obedient"


def test_built_in_and_own() -> None:
    registry = Registry([OWN])
    assert {"exact_match", "numeric", "reasoning_gym", "obedient"} <= set(registry.names)
    assert registry.make("obedient", {}).version == "7"
    assert registry.make("exact_match", {"answer": "a"}).score(ScoreInput(text="a"))


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(TaskError, match="exact_match"):
        Registry().make("exact", {})


def test_unknown_parameter_raises() -> None:
    with pytest.raises(TypeError, match="tolerence"):
        Registry().make("numeric", {"tolerence": 1})


def test_a_name_may_not_be_claimed_twice() -> None:
    with pytest.raises(ValueError, match="numeric"):
        Registry(["numeric=tests.support.verifiers:Obedient"])
    Registry([OWN, OWN])


@pytest.mark.parametrize("text", ["", "x", "x=", "x=y", "=m:a", "m:", ":a"])
def test_malformed_references(text: str) -> None:
    with pytest.raises(ValueError, match="name=module:attr"):
        parse_reference(text)


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_SCORER_VERIFIERS", f"{OWN}, tests.support.verifiers:Obedient")
    assert ScorerSettings().verifiers == (OWN, "tests.support.verifiers:Obedient")
    monkeypatch.setenv("ROLLGRID_SCORER_VERIFIERS", "nonsense")
    with pytest.raises(ValidationError, match="name=module:attr"):
        ScorerSettings()


def test_webhook_secrets_belong_to_entries_of_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed = AllowList(["https://a.org/x", "https://b.org private"])
    assert ScorerSettings().webhook_keys(allowed) == {}
    file = tmp_path / "secrets"
    file.write_text('{"https://a.org/x": "whsec_AAEC", "https://b.org": "plain"}\n')
    monkeypatch.setenv("ROLLGRID_SCORER_WEBHOOK_SECRETS_FILE", str(file))
    assert ScorerSettings().webhook_keys(allowed) == {"https://a.org/x": b"\x00\x01\x02", "https://b.org": b"plain"}
    for text in ('{"https://c.org": "hush"}', '{"https://a.org/x": 7}', "hush", '{"https://a.org/x": "whsec_!"}'):
        with pytest.raises(ValueError, match="secret") as caught:
            ScorerSettings(webhook_secrets=SecretStr(text)).webhook_keys(allowed)
        assert "hush" not in str(caught.value)


def test_workers_see_no_secrets() -> None:
    seen = clean_environment(
        {"PATH": "/bin", "ROLLGRID_NATS_URL": "x", "AWS_PROFILE": "x", "MY_TOKEN": "x", "hf_token": "x", "API_KEY": "x"}
    )
    assert seen["PATH"] == "/bin"
    assert not {"ROLLGRID_NATS_URL", "AWS_PROFILE", "MY_TOKEN", "hf_token", "API_KEY"} & set(seen)
