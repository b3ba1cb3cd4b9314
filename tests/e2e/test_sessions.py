"""A03, A25, A50: a session over the `openai` SDK on real vLLM; every sampled token's logprob is a forward's, over the whole path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from tests.e2e.conftest import Door
from tests.e2e.reference import logits, logprobs
from tests.support.tiny_models import EOS_ID

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]
TOLERANCE = 1e-4
TURNS = 20
LIKELIEST = 20
IMPOSSIBLE = -1000.0
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"where": {"enum": ["left", "right"]}},
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
]


NAMED: Any = {"type": "function", "function": {"name": "look"}}


def finite(model: Path) -> dict[str, Any]:
    """A random model writes white space and calls without end; this one ends where the grammar lets it."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    blank = [token for piece, token in vocabulary.items() if set(piece) <= set("ĠĊĉč")]
    return {str(EOS_ID): 100, **{str(token): -100 for token in blank}}


@pytest.fixture
def opened(http: httpx2.Client) -> dict[str, Any]:
    return dict(http.post("/v1/sessions", json={"run": "episodes", "hold": "pin"}).json())


@pytest.fixture
def client(vllm_door: Door, opened: dict[str, Any]) -> OpenAI:
    return OpenAI(base_url=vllm_door.stack.url + opened["base_path"], api_key="none", max_retries=0, timeout=120)


def test_twenty_turns_with_tools_are_token_exact_and_their_logprobs_a_forwards(
    vllm_door: Door, http: httpx2.Client, opened: dict[str, Any], client: OpenAI
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Where is the fox?"}]
    before: list[int] = []
    free: list[int] = []
    told: dict[int, list[dict[int, float]]] = {}
    bias = finite(vllm_door.model)
    for number in range(TURNS):
        forced = number % 2 == 0
        options: dict[str, Any] = {"tool_choice": "none", "max_tokens": 16}
        if forced:
            options = {"tool_choice": NAMED, "max_tokens": 60, "logit_bias": bias, "logprobs": True}
            options |= {"top_logprobs": LIKELIEST, "extra_body": {"return_tokens_as_token_ids": True}}
        answer = client.chat.completions.create(model=vllm_door.policy, messages=messages, tools=TOOLS, **options)
        raw = answer.model_dump()
        assert raw["session"]["fork"] is None, raw["session"]
        assert raw["prompt_token_ids"][: len(before)] == before
        before = raw["prompt_token_ids"] + raw["choices"][0]["token_ids"]
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if forced:
            told[number] = [_by_id(place) for place in raw["choices"][0]["logprobs"]["content"]]
            calls = raw["choices"][0]["message"]["tool_calls"] or []
            assert calls, raw["choices"][0]
            assert json.loads(calls[0]["function"]["arguments"])["where"] in ("left", "right")
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": "nothing there"} for one in calls]
        else:
            free.append(number)
            messages.append({"role": "user", "content": "and now?"})
    nodes = http.get(f"/v1/sessions/{opened['session']}", params={"token_ids": True}).json()["nodes"]
    assert nodes[-1]["cached_tokens"] > 0, "the last turn found what was sampled before in its worker's cache"
    closed = http.post(f"/v1/sessions/{opened['session']}/close", json={"reward": 1.0})
    assert closed.status_code == 200, closed.text
    (entry,) = _record(http, opened)["entries"]
    assert [turn["token_ids"] for turn in entry["turns"]] == [node["token_ids"] for node in nodes]
    assert _worst(vllm_door.model, entry["turns"], free) < TOLERANCE
    assert _worst_constrained(vllm_door.model, entry["turns"], told, bias) < TOLERANCE
    assert {span["version"] for turn in entry["turns"] for span in turn["version_spans"]} == {0}


def test_streamed_turns_on_two_branches_share_their_prefix_and_say_what_is_recorded(
    vllm_door: Door, http: httpx2.Client, opened: dict[str, Any], client: OpenAI
) -> None:
    def play(base: OpenAI, messages: list[Any]) -> dict[str, Any]:
        stream = base.chat.completions.create(
            model=vllm_door.policy, messages=messages, max_tokens=24, stream=True, logprobs=True
        )
        chunks = [chunk.model_dump() for chunk in stream]
        choices = [chunk["choices"][0] for chunk in chunks]
        return {
            "prompt": chunks[0]["prompt_token_ids"],
            "tokens": [token for choice in choices for token in choice.get("token_ids") or []],
            "logprobs": [
                one["logprob"] for choice in choices for one in (choice.get("logprobs") or {}).get("content") or []
            ],
            "text": "".join(choice["delta"].get("content") or "" for choice in choices),
            "place": chunks[0]["session"],
        }

    asked: list[Any] = [{"role": "user", "content": "one two three"}]
    first = play(client, asked)
    more = [*asked, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "go on"}]
    fork = http.post(f"/v1/sessions/{opened['session']}/fork", json={"from_turn": 0, "reason": "best_of_n"}).json()
    leaves = [play(client, more), play(client.with_options(base_url=vllm_door.stack.url + fork["base_path"]), more)]
    assert [leaf["place"]["parent"] for leaf in leaves] == [0, 0]
    assert [leaf["place"]["branch"] for leaf in leaves] == ["main", fork["branch"]]
    for leaf in leaves:
        assert leaf["prompt"] == leaves[0]["prompt"]
        assert leaf["prompt"][: len(first["prompt"] + first["tokens"])] == first["prompt"] + first["tokens"]
        want = logprobs(vllm_door.model, leaf["prompt"], leaf["tokens"], 1.0)
        assert max(abs(a - b) for a, b in zip(leaf["logprobs"], want, strict=True)) < TOLERANCE
    http.post(f"/v1/sessions/{opened['session']}/close")
    (entry,) = _record(http, opened)["entries"]
    recorded = [turn["token_ids"] for turn in entry["turns"]]
    assert recorded == [first["tokens"], *(leaf["tokens"] for leaf in leaves)]


def _record(http: httpx2.Client, opened: dict[str, Any]) -> dict[str, Any]:
    params = {"cursor": opened["cursor"], "wait_s": 30}
    page = http.get(f"/v1/runs/{opened['run']}/trajectories", params=params).json()
    (found,) = [one["group"] for one in page["groups"] if one["group"]["group_id"] == opened["group_id"]]
    return dict(found)


def _worst(folder: Path, turns: list[dict[str, Any]], free: list[int]) -> float:
    """Largest |Δlogprob| against one forward over the whole path, over the turns that nothing constrained."""
    path: list[int] = []
    sampled: dict[int, float] = {}
    for number, turn in enumerate(turns):
        path += turn["node"]["observation"]
        if number in free:
            sampled |= dict(enumerate(turn["logprobs"], len(path)))
        path += turn["token_ids"]
    want = logprobs(folder, path[:1], path[1:], 1.0)
    assert len(sampled) >= len(free)
    return max(abs(value - want[at - 1]) for at, value in sampled.items())


def _by_id(place: dict[str, Any]) -> dict[int, float]:
    """Of one sampled token and its likeliest alternatives: id to logprob."""
    return {int(one["token"].removeprefix("token_id:")): one["logprob"] for one in [*place["top_logprobs"], place]}


def _worst_constrained(
    folder: Path, turns: list[dict[str, Any]], told: dict[int, list[dict[int, float]]], bias: dict[str, Any]
) -> float:
    """Largest |Δlogprob| of the sampled tokens of turns that a grammar and a bias held.

    Among what the grammar allows, a logprob is the biased logit less one number per place: that of the alternatives
    which were told, all that are allowed where those are fewer than were asked for.
    """
    path: list[int] = []
    sampled: dict[int, tuple[int, float, dict[int, float]]] = {}
    for number, turn in enumerate(turns):
        path += turn["node"]["observation"]
        for place, alternatives in enumerate(told.get(number, [])):
            token = turn["token_ids"][place]
            sampled[len(path) + place] = (token, turn["logprobs"][place], alternatives)
        path += turn["token_ids"]
    before = logits(folder, path)
    worst, whole = 0.0, 0
    for at, (token, logprob, alternatives) in sampled.items():
        allowed = {one: value for one, value in alternatives.items() if value > IMPOSSIBLE}
        held = {one: float(before[at - 1][one]) + float(bias.get(str(one), 0)) for one in allowed}
        mass = math.log(sum(math.exp(value) for value in allowed.values()))
        least = max(held.values())
        norm = least + math.log(sum(math.exp(value - least) for value in held.values())) - mass
        worst = max(worst, abs(logprob - (held[token] - norm)))
        if len(allowed) < LIKELIEST:
            whole += 1
            assert abs(mass) < TOLERANCE, "these are all, so they share the whole probability"
    assert whole > len(told), "at many places the grammar allows few tokens"
    return worst
