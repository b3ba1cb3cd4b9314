"""A GRPO rollout in turns, with a tool: sums; the policy may call `add`, and is rewarded for the right last answer.

rollgrid up --tool-parser hermes      (the parser of your model)
python -m examples.sessions ['{"temperature": 0.8}']
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from rollgrid import Client, EpisodeEnded, Session, group_advantages, run_episodes, to_arrays

NUMBER = {"type": "integer"}
ADD = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "The sum of a and b.", "parameters": ADD}}]
TASKS, N, MOST_TURNS = [(1, 2), (2, 2), (12, 30), (7, 5)], 4, 4


def add(call: dict[str, Any]) -> str:
    """The environment: runs at your side, on what the policy asked for."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"


def play(session: Session, task: tuple[int, int]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {task[0]} + {task[1]}?"}]
    turn_rewards, answer = {}, ""
    for _ in range(MOST_TURNS):
        turn = session.sample(messages, tools=TOOLS)
        messages.append(turn.message)
        if not turn.tool_calls:
            answer = turn.text
            break
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": add(call)} for call in turn.tool_calls]
        turn_rewards[turn.number] = 0.1
    session.close(float(str(sum(task)) in answer), turn_rewards=turn_rewards)


def told(episode: EpisodeEnded[Any]) -> None:
    print(f"{episode.done}/{episode.total}  task {episode.position}.{episode.index}  {episode.error or 'played'}")


if __name__ == "__main__":
    sampling = {"max_tokens": 96, **json.loads(sys.argv[1] if sys.argv[1:] else "{}")}
    with Client() as client:  # $ROLLGRID_URL and $ROLLGRID_API_KEY, or the stack that runs on this machine
        groups = run_episodes(client, TASKS, play, n=N, run="sums", sampling=sampling, progress=told)
    rows = to_arrays(groups)
    advantages = group_advantages(rows["rewards"], rows["group_index"], sample_index=rows["sample_index"])
    weights = np.where(rows["first"], advantages[:, None], 0.0)  # each sampled token once; nothing on what was observed
    print(
        f"mean reward {np.nanmean(rows['rewards']):.2f}, {rows['first'].sum()} tokens to train, weights {weights.shape}"
    )
