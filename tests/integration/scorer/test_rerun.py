"""Scores from job to record to SDK, and `rollgrid verify rerun` over what is stored: nothing is sampled again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pyarrow.parquet as pq
import pytest
from rollgrid import Client, Group
from rollgrid.export import to_parquet

from tests.support.stack import Stack, scripted, stack
from tests.support.webhook_server import WebhookServer, webhook_server

ROOT = str(Path(__file__).resolve().parents[3])
SOUND = "tests.support.flawed_verifiers:Sound"
CONTRARY = "tests.support.flawed_verifiers:Contrary"
PROGRAM = [sys.executable, "-c", "from rollgrid.cli import main; main()"]
TASKS = 5


@pytest.fixture(scope="module")
def hook() -> Iterator[WebhookServer]:
    with webhook_server() as server:
        yield server


@pytest.fixture(scope="module")
def pipe(hook: WebhookServer) -> Iterator[Stack]:
    env = {
        "PYTHONPATH": ROOT,
        "ROLLGRID_WEBHOOK_ALLOW": f"{hook.url('/score')} private",
        "ROLLGRID_SCORER_VERIFIERS": f"sound={SOUND}",
        "ROLLGRID_INGEST_SCORERS": json.dumps(["sound", "length", "exact_match"]),
    }
    with stack(scripted(samplers=1, slots=64, env=env)) as running:
        yield running


@pytest.fixture(scope="module")
def groups(pipe: Stack, hook: WebhookServer) -> list[Group]:
    """Five tasks of two samples, the last without a reference for `sound`; then the only sampler ends."""
    scorers: list[Any] = [
        {"type": "sound", "name": "sound"},
        {"type": "webhook", "weight": 0.5, "params": {"url": hook.url("/score")}},
        {"type": "length", "gate": True, "params": {"min": 1, "max": 8, "ramp": 8}},
    ]
    tasks: list[Any] = [{"prompt": f"{k}=", "task": {"answer": " "} if k < TASKS - 1 else {}} for k in range(TASKS)]
    with Client(pipe.url) as client:
        batch = client.submit(
            tasks, n=2, sampling={"max_tokens": 12, "seed": 5}, scorers=scorers, run="scored",
            reward_formula="(1*sound + 0.5*webhook) * gate(length)",
        )  # fmt: skip
        found = sorted(batch.groups(timeout=60), key=lambda group: group.position)
        length: dict[str, Any] = {"type": "length", "params": {"min": 1, "max": 8, "ramp": 8}}
        play(client, [length, {"type": "exact_match", "name": "exact"}])
    pipe["sampler-0"].kill()
    return found


def play(client: Client, scorers: list[Any]) -> None:
    """A session of three turns, one on a branch that no scorer sees."""
    with client.sessions.open(run="played", scorers=scorers, task={"answer": " "}) as session:
        for number in range(2):
            session.sample(observation_token_ids=[7 + number, 8], max_tokens=12, seed=5)
            if number == 0:
                session.fork().sample(observation_token_ids=[9], max_tokens=12, seed=5)


def rerun(pipe: Stack, *arguments: str, run: str = "scored") -> tuple[int, list[dict[str, Any]], str]:
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("ROLLGRID_")}, "ROLLGRID_URL": pipe.url}
    done = subprocess.run(
        [*PROGRAM, "verify", "rerun", "--run", run, "--json", *arguments],
        capture_output=True, text=True, timeout=100, env=env, cwd=ROOT,
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def agreements(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {line["scorer"]: line for line in lines if line["event"] == "agreement"}


def test_scores_reach_the_record_the_sdk_and_parquet(groups: list[Group], tmp_path: Path) -> None:
    assert len(groups) == TASKS
    for group in groups:
        assert group.closed.reward_formula == "(1*sound + 0.5*webhook) * gate(length)"
        for sample in group:
            sound, webhook, length = sample.scores
            assert (webhook.status.value, webhook.version) == ("scored", "1+rev-9")
            if group.position == TASKS - 1:
                assert (sound.status.value, sample.reward, sample.turn_values) == ("verifier_error", None, {})
            else:
                assert sound.value is not None
                assert webhook.value is not None
                assert length.value is not None
                assert sample.reward == (1 * sound.value + 0.5 * webhook.value) * length.value
                assert sample.turn_values == {"sound": sound.turn_values}
                assert sample.turn_values["sound"]
        copy = Group.from_dict(group.to_dict())
        assert [sample.turn_values for sample in copy] == [sample.turn_values for sample in group]
    to_parquet(groups, tmp_path / "out.parquet")
    row = json.loads(pq.read_table(tmp_path / "out.parquet")["scores"][0].as_py())
    assert row[0]["turn_values"] == list(groups[0].samples[0].turn_values["sound"])


def test_the_same_code_agrees_with_itself(pipe: Stack, groups: list[Group]) -> None:
    code, lines, errors = rerun(pipe, "--scorer", f"sound={SOUND}", "--scorer", "length", "--strict")
    assert (code, errors) == (0, "")
    found = agreements(lines)
    assert sorted(found) == ["length", "sound"]
    for agreement in found.values():
        assert (agreement["samples"], agreement["equal"], agreement["changed"]) == (2 * TASKS, 2 * TASKS, 0)
        assert agreement["old"] == agreement["new"]
    assert found["sound"]["new"]["nulls"] == 2
    assert found["sound"]["new"]["statuses"]["verifier_error"] == 2
    values = [score.value for group in groups for sample in group for score in sample.scores if score.scorer == "sound"]
    numbers = [value for value in values if value is not None]
    assert found["sound"]["new"]["mean"] == pytest.approx(sum(numbers) / len(numbers))


def test_a_session_is_scored_again_as_it_was(pipe: Stack, groups: list[Group]) -> None:
    """On the same path: the last answer of the main branch."""
    with Client(pipe.url) as client:
        group = next(client.trajectories("played", timeout=60))
    [sample] = group.samples
    length, exact = sample.scores
    assert (len(sample.turns), length.status.value, exact.value) == (3, "scored", 0.0)
    assert sample.reward == length.value
    code, lines, errors = rerun(pipe, "--strict", run="played")
    assert (code, errors) == (0, "")
    assert sorted(agreements(lines)) == ["exact", "length"]
    for agreement in agreements(lines).values():
        assert (agreement["samples"], agreement["equal"], agreement["changed"]) == (1, 1, 0)


def test_other_code_shows_what_changed(pipe: Stack, groups: list[Group]) -> None:
    code, lines, _ = rerun(pipe, "--scorer", f"sound={CONTRARY}", "--strict")
    assert code == 7
    changed = [line for line in lines if line["event"] == "changed"]
    assert len(changed) == 2 * (TASKS - 1)
    assert all(line["new"]["value"] == 1.0 - line["old"]["value"] for line in changed)
    agreement = agreements(lines)["sound"]
    assert (agreement["old"]["versions"], agreement["new"]["versions"]) == (["3"], ["4"])
    assert agreement["largest_difference"] == 1.0


def test_limits_new_scorers_and_an_empty_run(pipe: Stack, groups: list[Group]) -> None:
    code, lines, _ = rerun(
        pipe, "--limit", "2", "--scorer", '{"type": "regex", "name": "any", "params": {"pattern": "."}}'
    )
    assert code == 0
    any_, summary = agreements(lines)["any"], lines[-1]
    assert (any_["samples"], any_["compared"], any_["old"]["statuses"]) == (4, 0, {"absent": 4})
    assert (any_["new"]["mean"], summary["groups"]) == (1.0, 2)
    assert rerun(pipe, run="nobody")[:2] == (
        0,
        [{"event": "summary", "run": "nobody", "groups": 0, "posted": None}],
    )


def test_wrong_usage_is_said(pipe: Stack, groups: list[Group]) -> None:
    assert rerun(pipe, "--post", "again")[0] == 2
    assert rerun(pipe, "--scorer", "x=nonsense")[0] == 2
    assert rerun(pipe, "--scorer", '{"name": "x"}')[0] == 2
    for unknown in (("--scorer", "zork"), ("--scorer", '{"type": "zork"}'), ()):  # `sound` is not installed
        code, lines, errors = rerun(pipe, "--strict", *unknown)
        assert (code, lines) == (2, [])
        assert f"no verifier is named '{'zork' if unknown else 'sound'}'" in errors
    code, lines, _ = rerun(pipe, "--limit", "1", "--scorer", "sound=no_such_module:Thing")
    assert code == 0
    assert agreements(lines)["sound"]["new"]["statuses"] == {"verifier_error": 2}


def test_new_values_are_posted_as_rewards_once(pipe: Stack, groups: list[Group]) -> None:
    for _ in range(2):  # the second run posts the same: it is one post
        code, lines, errors = rerun(pipe, "--scorer", "length", "--post", "length-again")
        assert code == 0, errors
        assert lines[-1]["posted"] == 2 * TASKS
        assert len([line for line in lines if line["event"] == "posted"]) == TASKS
    with httpx2.Client(base_url=pipe.url) as http:
        stored = http.get("/v1/runs/scored/rewards").json()
    posts = [item["post"] for item in stored["posts"]]
    assert {post["group_id"] for post in posts} == {group.id for group in groups}
    assert len(posts) == TASKS
    assert {post["source"] for post in posts} == {"rerun"}
    by_group = {post["group_id"]: post["rewards"] for post in posts}
    for group in groups:
        lengths = [score.value for sample in group for score in sample.scores if score.scorer == "length"]
        assert [(r.get("index", 0), r["name"], r["value"]) for r in by_group[group.id]] == [
            (index, "length-again", value) for index, value in enumerate(lengths)
        ]
