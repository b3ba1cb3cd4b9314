"""verifiers' evaluation client (streamed chats) and training client (token level), unmodified; a tool task in sessions.

The harness is its `null` one: a program that `uv` runs, which talks to the rollout's interception
server, which talks to ingest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollgrid import Client, Group

from .conftest import MODEL_ID, Door, run_in

pytestmark = [pytest.mark.clients, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = Path(__file__).with_name("tasks")
EPISODES = 3 * 2
ROUNDING = 1e-4
"""traces.jsonl has logprobs to four decimals."""


def evaluated(door: Door, run_client: Callable[..., str], folder: Path, kind: str, *more: str) -> list[dict[str, Any]]:
    """The traces of `vf-eval` over the taskset."""
    command = ["vf-eval", "letters-v1", "--model", MODEL_ID, "--num-rollouts", "2"]
    command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
    command += [
        "--client.type",
        kind,
        "--client.base-url",
        f"{door.url}/v1",
        "--client.api-key-var",
        "ROLLGRID_API_KEY",
    ]
    command += ["--sampling.max-tokens", "16", "--sampling.temperature", "1.0"]
    command += ["--output-dir", str(folder), "--run.name", kind, "--no-push", *more]
    env = {"ROLLGRID_API_KEY": "any", "PYTHONPATH": str(TASKS), "HF_HUB_OFFLINE": "1"}
    run_client("verifiers", command, env)
    lines = (folder / kind / "traces.jsonl").read_text().splitlines()
    assert len(lines) == EPISODES
    traces = []
    for line in lines:
        episode = json.loads(line)
        (trace,) = episode["traces"]
        assert episode["ok"] is True, (episode["errors"], trace["errors"])
        assert 0 <= trace["rewards"]["letters"]["score"] <= 1
        assert trace["metrics"]["length"] > 0
        traces.append(trace)
    return traces


def test_verifiers_evaluation_client(door: Door, run_client: Callable[..., str], tmp_path: Path) -> None:
    before = len(door.samples())
    traces = evaluated(door, run_client, tmp_path, "eval")
    records = door.samples()[before:]
    assert len(records) == EPISODES
    counted = sorted((trace["num_input_tokens"], trace["num_output_tokens"]) for trace in traces)
    assert counted == sorted((len(record["prompt"]), len(record["token_ids"])) for record in records)


def test_verifiers_training_client(door: Door, run_client: Callable[..., str], tmp_path: Path) -> None:
    before = len(door.samples())
    traces = evaluated(door, run_client, tmp_path, "train", "--client.renderer-model-name", str(door.model))
    records = {tuple(record["token_ids"]): record for record in door.samples()[before:]}
    assert len(records) == EPISODES
    for trace in traces:
        (sampled,) = [node for node in trace["nodes"] if node["sampled"]]
        trained = [token for token, own in zip(sampled["token_ids"], sampled["mask"], strict=True) if own]
        record = records.pop(tuple(trained))
        assert sampled["logprobs"] == pytest.approx(record["logprobs"], abs=ROUNDING)
        before_it = [token for node in trace["nodes"] if not node["sampled"] for token in node["token_ids"]]
        prefix = [token for token, own in zip(sampled["token_ids"], sampled["mask"], strict=True) if not own]
        assert record["prompt"][: len(before_it)] == before_it
        assert set(prefix) <= set(record["prompt"])
    assert not records


# -- sessions: each rollout has a URL of its own --------------------------------------------------------

GROUPS, N, MAX_TURNS = 2, 2, 4


def calling(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


SAYS = [calling(1, 2), calling(2, 2), calling(7, 5), "It is 3.", "It is 4."]
"""The model is random: a grammar lets it call the tool, or answer."""


@pytest.fixture(scope="module")
def tool_episodes(door: Door, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Group]]:
    """What verifiers saw of `GROUPS * N` rollouts at once, and the groups that became of them."""
    with Client(door.url) as client:
        sessions = [
            client.sessions.open(run="adder", group=f"task-{task}", index=index, n=N)
            for task in range(GROUPS)
            for index in range(N)
        ]
        episodes = [{"task": number // N, "base_url": session.base_url} for number, session in enumerate(sessions)]
        sampling = {"max_tokens": 96, "temperature": 1.0, "structured_outputs": {"choice": SAYS}}
        asked = json.dumps({"model": MODEL_ID, "max_turns": MAX_TURNS, "sampling": sampling, "episodes": episodes})
        command = ["python", str(TASKS / "verifiers_sessions.py"), asked]
        env = {
            "ROLLGRID_API_KEY": "any",
            "PYTHONPATH": str(TASKS),
            "HF_HUB_OFFLINE": "1",
        }
        said = run_in(tmp_path_factory.mktemp("adder"), "verifiers", command, env)
        traces: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
        for session, trace in zip(sessions, traces, strict=True):
            session.close(trace["reward"], failed=not trace["ok"], detail=str(trace["errors"]))
        reading = client.trajectories("adder", until={session.group_id for session in sessions}, timeout=60)
        groups = sorted(reading, key=lambda group: group.label or "")
        return traces, groups


def test_A25_a_verifiers_tool_task_fills_groups_through_session_urls(
    tool_episodes: tuple[list[dict[str, Any]], list[Group]],
) -> None:
    traces, groups = tool_episodes
    assert [trace["errors"] for trace in traces if not trace["ok"]] == []
    assert [group.counts for group in groups] == [{"succeeded": N}] * GROUPS
    samples = [sample for group in groups for sample in group]
    assert [sample.reward for sample in samples] == [trace["reward"] for trace in traces]
    for sample, trace in zip(samples, traces, strict=True):
        assert 1 <= len(sample.turns) <= MAX_TURNS
        assert [turn.record.parsed.content or None for turn in sample.turns if turn.record.parsed] == [
            answer or None for answer in trace["answers"]
        ]


def test_C39_tool_calls_and_what_they_gave_are_in_the_trajectory(
    tool_episodes: tuple[list[dict[str, Any]], list[Group]],
) -> None:
    traces, groups = tool_episodes
    called: Counter[str] = Counter()
    for sample, trace in zip([sample for group in groups for sample in group], traces, strict=True):
        assert all(turn.node.fork is None for turn in sample.turns)
        (path,) = sample.paths()
        assert int(path.first.sum()) == sum(len(turn) for turn in sample.turns)
        given = [m["content"] for turn in sample.turns for m in turn.node.messages if m["role"] == "tool"]
        assert given == trace["tools"][: len(given)]
        for turn, result in zip(sample.turns, given, strict=False):
            (tool_call,) = turn.tool_calls
            arguments = json.loads(tool_call["function"]["arguments"])
            assert json.loads(result) == arguments["a"] + arguments["b"]
            called[tool_call["function"]["name"]] += 1
    assert called["add"] > 0
