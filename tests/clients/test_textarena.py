"""TextArena's games, as they are, played in turns through session URLs: whole groups of parallel episodes (A25, A32, A49)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rollgrid import Client, Group, Sample

from .conftest import MODEL_ID, Door, run_in

pytestmark = [pytest.mark.clients, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("tasks") / "textarena_games.py"
GAMES, N, CONCURRENCY = 2, 4, 8


@pytest.fixture(scope="module")
def played(door: Door, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw."""
    command = ["python", str(PROGRAM), MODEL_ID, str(N), str(CONCURRENCY)]
    env = {"ROLLGRID_URL": door.url}
    found: dict[str, Any] = json.loads(
        run_in(tmp_path_factory.mktemp("games"), "textarena", command, env).splitlines()[-1]
    )
    return found


@pytest.fixture(scope="module")
def groups(door: Door, played: dict[str, Any]) -> list[Group]:
    with Client(door.url) as client:
        return [client.group(group_id) for group_id in played["groups"]]


def test_every_group_is_complete_with_the_games_own_rewards(played: dict[str, Any], groups: list[Group]) -> None:
    assert [group.counts for group in groups] == [{"succeeded": N}] * GAMES
    episodes = played["episodes"]
    assert len(episodes) == GAMES * N
    for group in groups:
        assert {episodes[sample.session]["game"] for sample in group} == {episodes[group.samples[0].session]["game"]}
        for sample in group:
            assert sample.reward == pytest.approx(episodes[sample.session]["reward"])
    assert max(len(sample.turns) for group in groups for sample in group) >= 3


def test_each_turn_goes_on_behind_the_tokens_sampled_before(played: dict[str, Any], groups: list[Group]) -> None:
    trained = 0
    for sample in itertools.chain.from_iterable(groups):
        seen = played["episodes"][sample.session]["turns"]
        for number, turn in enumerate(seen):
            assert turn["session"]["parent"] == (number - 1 if number else None)
            assert turn["session"].get("fork") is None
        for earlier, later in itertools.pairwise(seen):
            before = earlier["prompt"] + earlier["sampled"]
            assert later["prompt"][: len(before)] == before
        assert [turn.token_ids.tolist() for turn in sample.turns] == [turn["sampled"] for turn in seen]
        (path,) = sample.paths()
        assert [*path.prompt_ids.tolist(), *path.completion_ids.tolist()] == seen[-1]["prompt"] + seen[-1]["sampled"]
        trained += int(path.first.sum())
    assert played["trained"] == trained == sum(len(t) for s in itertools.chain(*groups) for t in s.turns)


def test_episodes_are_played_side_by_side(groups: list[Group]) -> None:
    def times(sample: Sample) -> tuple[float, float]:
        return sample.turns[0].record.timings.started_at, sample.turns[-1].record.timings.finished_at

    spans = [times(sample) for group in groups for sample in group]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in itertools.combinations(spans, 2))


def test_the_example_of_a_rollout_with_a_tool_runs(door: Door, tmp_path: Path) -> None:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>' for a in (1, 2)]
    said = json.dumps({"structured_outputs": {"choice": [*calls, "It is 3.", "It is 4."]}})
    env = {"ROLLGRID_URL": door.url, "PYTHONPATH": str(ROOT)}
    lines = run_in(tmp_path, "textarena", ["python", "-m", "examples.sessions", said], env).splitlines()
    assert [line.split()[-1] for line in lines[:-1]] == ["played"] * 16
    with Client(door.url) as client:
        turns = [turn for group in client.trajectories("sums", follow=False) for s in group for turn in s.turns]
    assert {len(turn.tool_calls) for turn in turns} == {0, 1}
    assert all(turn.reward == 0.1 for turn in turns if turn.tool_calls)
    assert f"{sum(len(turn) for turn in turns)} tokens to train" in lines[-1]
